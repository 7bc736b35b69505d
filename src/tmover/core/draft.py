"""A decision being written: the job as it will be, and the actions so far.

The modules that decide (`form`, `move`, `recover`, ...) are handed one `Draft` each time `decide`
is called. It never outlives the call, so that `decide` stays a function of a job and an event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from tmover.core.events import Wait
from tmover.core.orders import (
    Action,
    ArmDeadline,
    EndJob,
    EndNode,
    Note,
    OrderNode,
    ReassignNode,
    ReleaseNode,
    Stop,
    Welcome,
)
from tmover.core.phase import Ended
from tmover.core.roster import Agent, Farewell, Job, Ordered

UNFIT = 3
"""Standbys in a row that cannot rehearse the script: then none is ordered any more."""
RELEASED = Farewell(0, "released")
LEFT_S = 3600.0
"""A node that was left, or lost, is not asked for again for so long: there was a reason."""


class Draft:
    """The job after the event, as far as it is decided, and what to do about it, in order."""

    def __init__(self, job: Job, at: float) -> None:
        self.job = job
        self.at = at
        """The controller's wall clock at the event."""
        self.actions: list[Action] = []

    # --- writing ----------------------------------------------------------------------------------

    def set(self, **changes: Any) -> None:
        """Change fields of the job. The job stays the same object if nothing changes."""
        if any(getattr(self.job, name) != value for name, value in changes.items()):
            self.job = dataclasses.replace(self.job, **changes)

    def put(self, agent: Agent, **changes: Any) -> None:
        """Add the agent, or change what is known of it."""
        changed = dataclasses.replace(agent, **changes)
        if self.job.agents.get(changed.name) == changed:
            return
        self.set(agents={**self.job.agents, changed.name: changed})

    def do(self, *actions: Action) -> None:
        """Add actions."""
        self.actions += actions

    def note(self, text: str) -> None:
        """Say what was decided and why."""
        self.do(Note(job=self.job.name, text=text))

    def arm(self, wait: Wait, epoch: int) -> None:
        """Ask for a `DeadlinePassed` after the configured time."""
        self.do(ArmDeadline(job=self.job.name, wait=wait, epoch=epoch))

    def next_epoch(self) -> int:
        """Return an epoch number that was never used."""
        self.set(epoch=self.job.epoch + 1)
        return self.job.epoch

    # --- agents -----------------------------------------------------------------------------------

    def living(self, agents: Iterable[str]) -> list[str]:
        """Return those of `agents` that are of the job, workers or not, each once, in order."""
        return [agent for agent in dict.fromkeys(agents) if agent in self.job.agents]

    def seat(self, slot: int, name: str) -> None:
        """Give a slot to an agent, or to nobody."""
        slots = self.job.slots
        self.set(slots=(*slots[:slot], name, *slots[slot + 1 :]))

    def greet(self, agent: Agent) -> None:
        """Add the agent and tell it who it is."""
        self.put(agent)
        self.do(welcome(self.job, agent))

    def relaunch(self, agent: Agent, *, slot: int, sandbox: bool) -> None:
        """Have the agent start its workers afresh."""
        self.greet(
            dataclasses.replace(
                agent,
                launch=agent.launch + 1,
                slot=slot,
                sandbox=sandbox,
                endpoints=(),
                schemas={},
                recorded={},
                warmth={},
                exit=None,
                cast=0,
                prove=False,
                rehearsed=frozenset(),
                proofs={},
            )
        )

    def recast(self, agent: Agent, *, slot: int, prove: bool) -> None:
        """Have the processes of a warm standby rehearse another slot.

        With `prove` they first try to become its ranks in place.
        """
        self.greet(
            dataclasses.replace(
                agent,
                cast=agent.cast + 1,
                slot=slot,
                schemas={},
                prove=prove,
                proofs={} if prove else agent.proofs,
            )
        )

    def forget(self, name: str) -> None:
        """Drop what the agent's workers said of where they stand: it counts no more."""
        job, workers = self.job, set(self.job.workers([name]))
        reports = {key: report for key, report in job.reports.items() if key[0] not in workers}
        self.set(reports=reports, verified=job.verified - workers)

    def dismiss(self, name: str, farewell: Farewell) -> None:
        """Let an agent go for good, and its node with it."""
        agent = self.job.agents.get(name)
        self._drop(name, farewell)
        if agent is not None and self.job.allocated:
            self.do(
                ReleaseNode(job=self.job.name, agent=name, node=agent.node, reason=farewell.reason)
            )

    def lend(self, agent: Agent, to: str) -> None:
        """Let another job have a standby, and its node with it."""
        afresh = bool(self.job.stubborn)
        self._forgo(agent.name, Farewell(0, f"lent to job {to}", to, afresh, self.at))
        self.note(f"{agent.node} is lent to job {to}")
        self.do(
            ReassignNode(job=self.job.name, agent=agent.name, node=agent.node, to=to, afresh=afresh)
        )

    def lose(self, name: str, reason: str) -> None:
        """Give up an agent with its node and every other agent on it, and fence the node.

        None of these agents comes back. Nothing happens if it has gone with its node before.
        """
        if name not in self.job.agents:
            return
        node = self.job.agents[name].node
        for agent in [agent for agent in self.job.agents.values() if agent.node == node]:
            self._drop(agent.name, Farewell(1, f"lost: {reason}"))
        self.set(left={**self.job.left, node: self.at})
        self.note(f"{node} is lost: {reason}")
        self.do(EndNode(job=self.job.name, node=node, reason=reason))

    def order(self, missing: int) -> None:
        """Ask for as many standbys as are missing, beyond those that are asked for already."""
        job = self.job
        short = missing - job.ordered.nodes
        if short <= 0 or job.unfit >= UNFIT:
            return
        total = missing if job.allocated else 0
        order = OrderNode(job=job.name, exclude=avoided(job, self.at), total=total)
        self.do(*[order] * short)
        self.set(ordered=Ordered(missing, job.epoch))
        self.arm(Wait.STANDBY, job.epoch)
        self.note(f"{short} more standby{'s' * (short > 1)} asked of the scheduler")

    def count_unfit(self) -> None:
        """Count a standby that is none for this job; after some in a row none is ordered more."""
        self.set(unfit=self.job.unfit + 1)
        if self.job.unfit == UNFIT:
            self.note(
                f"{UNFIT} standbys in a row could not rehearse the script: none is ordered more"
            )

    def end(self, code: int, reason: str) -> None:
        """End the job: every agent is told to stop."""
        for name in self.job.agents:
            self.do(Stop(job=self.job.name, agent=name, code=code, reason=reason))
        self.set(phase=Ended(code=code, reason=reason))
        self.note(f"the job ends: {reason}")
        if self.job.allocated:
            self.do(EndJob(job=self.job.name, code=code, reason=reason))

    def _forgo(self, name: str, farewell: Farewell) -> None:
        self.forget(name)
        agents = {known: agent for known, agent in self.job.agents.items() if known != name}
        self.set(agents=agents, gone={**self.job.gone, name: farewell})

    def _drop(self, name: str, farewell: Farewell) -> None:
        self._forgo(name, farewell)
        self.do(Stop(job=self.job.name, agent=name, code=farewell.code, reason=farewell.reason))


def welcome(job: Job, agent: Agent) -> Welcome:
    """Return the order that tells an agent who it is."""
    return Welcome(
        job=job.name,
        agent=agent.name,
        launch=agent.launch,
        slot=agent.slot,
        nnodes=job.nnodes,
        nproc=job.nproc,
        sandbox=agent.sandbox,
        cast=agent.cast,
        prove=agent.prove,
    )


def avoided(job: Job, at: float) -> tuple[str, ...]:
    """Return the nodes that a standby of `job`, if ordered at the time `at`, must not be on."""
    used = {agent.node for agent in job.agents.values()}
    left = {node for node, since in job.left.items() if at - since < LEFT_S}
    return tuple(sorted(used | left | job.requests.keys() | job.slow.keys()))
