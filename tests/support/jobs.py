"""Jobs at a given point of their life, for tests of the decision core.

Slot i is held by agent `ai` on node `ni`, standby i is agent `si` on node `mi`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from tmover.core.events import (
    AnyEvent,
    Broken,
    DeadlinePassed,
    Entered,
    Exited,
    Joined,
    Launched,
    LeaseExpired,
    Left,
    Looping,
    MoveRequested,
    Passed,
    Prepared,
    Reported,
    Submitted,
    Verified,
    Wait,
    Warm,
)
from tmover.core.job import Job, decide
from tmover.core.orders import Action, Note
from tmover.core.phase import Phase
from tmover.core.roster import Agent

SCHEMA = {"model": "m", "optimizer": "o"}


def joined(agent: str, *, nproc: int = 1, slot: int | None = None) -> Joined:
    """Return the word of an agent that is up; `s0` is a standby, `a0` proposes slot 0."""
    standby = agent[0] == "s"
    node = ("m" if standby else "n") + agent[1:]
    if slot is None and not standby:
        slot = int(agent[1:])
    return Joined(
        job="j", agent=agent, node=node, address=node, nproc=nproc, standby=standby, slot=slot
    )


def launched(agent: str, launch: int = 1, *, nproc: int = 1) -> Launched:
    ports = tuple(f"{agent}:{launch}{local}" for local in range(nproc))
    return Launched(job="j", agent=agent, launch=launch, endpoints=ports)


def looping(worker: str, launch: int = 1) -> Looping:
    return Looping(job="j", worker=worker, launch=launch, schema=SCHEMA)


def warm(
    worker: str,
    launch: int = 1,
    schema: dict[str, str] = SCHEMA,
    *,
    cast: int = 0,
    proof: str | None = None,
) -> Warm:
    return Warm(job="j", worker=worker, launch=launch, schema=schema, cast=cast, proof=proof)


def exited(agent: str, launch: int = 1, code: int = -9, reason: str = "killed") -> Exited:
    return Exited(job="j", agent=agent, launch=launch, code=code, reason=reason)


def left(agent: str, code: int = -15, reason: str = "told to end") -> Left:
    return Left(job="j", agent=agent, code=code, reason=reason)


def expired(agent: str) -> LeaseExpired:
    return LeaseExpired(job="j", agent=agent)


def broken(worker: str, *peers: str, epoch: int = 1) -> Broken:
    return Broken(job="j", worker=worker, epoch=epoch, peers=peers, reason="reset")


def reported(
    worker: str,
    step: int | None,
    *,
    of: int = 1,
    epoch: int | None = None,
    doubt: int | None = None,
) -> Reported:
    where = of if epoch is None else epoch
    return Reported(job="j", worker=worker, of=of, epoch=where, step=step, doubt=doubt)


def requested(node: str) -> MoveRequested:
    return MoveRequested(job="j", node=node, reason="maintenance")


def prepared(worker: str, epoch: int) -> Prepared:
    return Prepared(job="j", worker=worker, epoch=epoch)


def entered(worker: str, epoch: int, step: int) -> Entered:
    return Entered(job="j", worker=worker, epoch=epoch, step=step)


def verified(worker: str, epoch: int, step: int) -> Verified:
    return Verified(job="j", worker=worker, epoch=epoch, step=step)


def passed(worker: str, epoch: int, step: int) -> Passed:
    return Passed(job="j", worker=worker, epoch=epoch, step=step)


def overdue(wait: Wait, epoch: int) -> DeadlinePassed:
    return DeadlinePassed(job="j", wait=wait, epoch=epoch)


class Story:
    """A job and what happens to it."""

    def __init__(
        self,
        *,
        nnodes: int = 3,
        nproc: int = 1,
        standbys: int = 1,
        reserve: int = 0,
        allocated: bool = False,
        pool: str = "",
    ) -> None:
        self.pool = pool
        self.job = Job(name="j")
        self.nnodes, self.nproc, self.standbys = nnodes, nproc, standbys
        self.reserve, self.allocated = reserve, allocated

    def tell(self, *events: AnyEvent) -> list[Action]:
        """Feed `events`; return all actions but notes, in order."""
        return [action for action in self.hear(*events) if not isinstance(action, Note)]

    def hear(self, *events: AnyEvent) -> list[Action]:
        """Feed `events`; return all actions in order."""
        actions: list[Action] = []
        for event in events:
            self.job, more = decide(self.job, event)
            actions += more
        return actions

    def notes(self, *events: AnyEvent) -> list[str]:
        """Feed `events`; return the sentences that came of them."""
        return [action.text for action in self.hear(*events) if isinstance(action, Note)]

    def workers(self, agents: Iterable[str]) -> list[str]:
        return [f"{agent}/{local}" for agent in agents for local in range(self.nproc)]

    def with_agent(self, agent: Agent, **changes: Any) -> Job:
        """Return the job with something else known of an agent."""
        changed = dataclasses.replace(agent, **changes)
        return dataclasses.replace(self.job, agents={**self.job.agents, agent.name: changed})

    def now(self) -> Phase:
        """Return the phase the job is in now."""
        return self.job.phase

    @property
    def members(self) -> list[str]:
        return [f"a{slot}" for slot in range(self.nnodes)]

    # --- how far ----------------------------------------------------------------------------------

    def submitted(self) -> Story:
        self.hear(
            Submitted(
                job="j",
                nnodes=self.nnodes,
                nproc=self.nproc,
                owner="me",
                standby=self.reserve,
                allocated=self.allocated,
                pool=self.pool,
            )
        )
        return self

    def joined(self) -> Story:
        self.submitted()
        everybody = [*self.members, *(f"s{i}" for i in range(self.standbys))]
        self.hear(*[joined(agent, nproc=self.nproc) for agent in everybody])
        return self

    def starting(self) -> Story:
        self.joined()
        self.hear(*[launched(agent, nproc=self.nproc) for agent in self.members])
        return self

    def training(self) -> Story:
        self.starting()
        self.hear(*[looping(worker) for worker in self.workers(self.members)])
        for standby in range(self.standbys):
            self.warmed(f"s{standby}")
        return self

    def warmed(self, agent: str, launch: int = 1) -> list[Action]:
        """Let a standby's workers come up and rehearse, slot after slot, until they rest."""
        warms = [warm(worker, launch) for worker in self.workers([agent])]
        actions = self.tell(launched(agent, launch, nproc=self.nproc), *warms)
        while (known := self.job.agents.get(agent)) and known.cast and not known.is_ready:
            actions += self.recast(agent)
        return actions

    def recast(self, agent: str, proof: str = "") -> list[Action]:
        """Let a standby's workers rehearse the slot they were recast for."""
        known = self.job.agents[agent]
        proven = proof if known.prove else None
        workers = self.workers([agent])
        return self.tell(
            *[warm(worker, known.launch, cast=known.cast, proof=proven) for worker in workers]
        )

    def preparing(self, node: str = "n1") -> Story:
        self.training()
        self.hear(requested(node))
        return self

    def armed(self, node: str = "n1") -> Story:
        self.preparing(node)
        self.hear(*[prepared(worker, 2) for worker in self.workers([*self.members, "s0"])])
        return self

    def switching(self, step: int = 5, node: str = "n1") -> Story:
        """All members stand at the boundary after `step`; the joiner holds nothing yet."""
        self.armed(node)
        self.hear(*[entered(worker, 2, step) for worker in self.workers(self.members)])
        return self

    def revoked(self, lost: str = "a1") -> Story:
        """A member's workers were killed in training, and nobody has reported yet."""
        self.training()
        self.hear(exited(lost))
        return self

    def recovering(self, step: int = 5, lost: str = "a1") -> Story:
        """Epoch 2 is assigned: `s0` takes the place of the lost, all others stand at `step`."""
        self.revoked(lost)
        survivors = [agent for agent in self.members if agent != lost]
        self.hear(*[reported(worker, step) for worker in self.workers(survivors)])
        return self
