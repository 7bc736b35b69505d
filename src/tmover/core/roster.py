"""What the controller knows of a job: its agents, its slots and the world in force."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tmover.core.events import CARRIED_ALONG, NO_STEP, Member, Placing, Plan, Reported
from tmover.core.incident import Incident
from tmover.core.phase import New, Phase
from tmover.core.roles import Roles, Schema
from tmover.core.warmth import Warmth

_LAST_OWN_CODE = 125
"""A shell's own codes follow: not executable, not found, ended by a signal."""
_SIGNALLED = 128
"""Exit codes from here on, and negative ones, are a signal's: a death, not the script's error."""


class Exit(NamedTuple):
    """How the workers of an agent ended."""

    code: int
    reason: str
    is_error: bool
    """Whether the script itself gave up, rather than was killed or carried along by others."""

    @property
    def is_death(self) -> bool:
        """Whether a signal ended it."""
        return not 0 <= self.code < _SIGNALLED

    @property
    def job_code(self) -> int:
        """The exit code of a job that fails by this: the script's own, if that says failure."""
        is_own = 1 <= self.code <= _LAST_OWN_CODE and self.code != CARRIED_ALONG
        return self.code if is_own else 1


class Crashes(NamedTuple):
    """How often a slot was lost at one step, with no step applied in between."""

    step: int
    errors: int = 0
    """By its script's own error."""
    losses: int = 0
    """For any reason, while it trained in a whole world."""
    joiners: int = 0
    """Standbys that were lost while they took it over."""


class Acts(NamedTuple):
    """How often a slot was moved because its node was slow."""

    times: int = 0
    at: float = 0.0
    """The last time, by the wall clock."""


class Breaks(NamedTuple):
    """How often in a row the world of these agents broke with nobody lost and no step applied."""

    step: int
    slots: tuple[str, ...]
    times: int = 0


class Farewell(NamedTuple):
    """What an agent that is no longer of the job is told, whenever it asks."""

    code: int
    reason: str
    to: str = ""
    """The job that it was lent to: then it is told to go there instead of to end."""
    afresh: bool = False
    """As in `Lend`."""
    at: float = 0.0
    """When it was lent, by the controller's wall clock."""


class Request(NamedTuple):
    """A node that should carry no ranks though it still works."""

    reason: str
    attempts: int = 0
    """Moves that were tried for it and failed."""


class Ordered(NamedTuple):
    """Standbys that the scheduler was asked for and that have not come yet."""

    nodes: int = 0
    epoch: int = 0
    """The epoch that their deadline carries."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One `tmover run` and the current launch of its workers."""

    name: str
    node: str
    address: str
    launch: int
    lent_by: str = ""
    """The job whose standby it was before."""
    slot: int
    """The slot it holds; the one it rehearses while `sandbox`."""
    sandbox: bool
    endpoints: tuple[str, ...] = ()
    """Of its workers, by local rank; empty until they are up."""
    schemas: Mapping[str, Schema] = dataclasses.field(default_factory=dict)
    """What its workers track, by worker, once they loop or are warm."""
    warmth: Mapping[str, Warmth] = dataclasses.field(default_factory=dict)
    """How warm each of its workers has said to be, as a standby."""
    warm_at: float = 0.0
    """When one of them said so last."""
    recorded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the rehearsals of its workers were answered from, by worker; for people."""
    exit: Exit | None = None
    has_left: bool = False
    """Whether the agent itself has ended: it starts no workers any more."""
    failures: int = 0
    """Launches of it that ended badly, and moves to it that came to nothing."""
    doubted: int = 0
    """The epoch of a move to it that could not be prepared: it is asked whether it lives, and no
    other move to it is tried before it has said so. 0 if there is no doubt."""
    cast: int = 0
    """How often its processes were told to run the script again, as standbys for another slot."""
    prove: bool = False
    """Whether they were to prove what `proofs` says when they were told so last."""
    rehearsed: frozenset[int] = frozenset()
    """The slots for which these processes have run the script as standbys."""
    proofs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By worker, what came of the proof that it can become another rank in place; "" if it can."""

    @property
    def state(self) -> str:
        """What its workers are doing, in one word for people."""
        if self.exit is not None:
            return "exited"
        if not self.endpoints:
            return "launching"
        if len(self.schemas) < len(self.endpoints):
            return "building"
        return "warm" if self.sandbox else "looping"

    @property
    def is_ready(self) -> bool:
        """Whether all its workers loop, or are warm."""
        return 0 < len(self.endpoints) == len(self.schemas)

    @property
    def is_proven(self) -> bool:
        """Whether all its workers have shown that they can become other ranks in place."""
        return 0 < len(self.endpoints) == len(self.proofs) and not self.obstacle

    @property
    def obstacle(self) -> str:
        """Why a worker cannot become another rank in place, "" if nothing is known against it."""
        return next((why for why in self.proofs.values() if why), "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job as the controller knows it. Facts only; `decide` draws its decisions from them."""

    name: str
    nnodes: int = 0
    nproc: int = 0
    owner: str = ""
    reserve: int = 0
    """How many standbys are kept."""
    pool: str = ""
    """Jobs of one owner that name the same one lend each other standbys; "" is none."""
    allocated: bool = False
    """Whether the scheduler has its nodes in allocations, which are to be given back."""
    phase: Phase = dataclasses.field(default_factory=New)
    epoch: int = 0
    """The highest epoch ever named. No number is used twice, not even that of an aborted move."""
    plan: Plan | None = None
    """The world in force: the one that was started, passed by all, or assigned."""
    slots: tuple[str, ...] = ()
    """The agent of each slot, "" if it has none. It may be lost: then the slot is vacant."""
    agents: Mapping[str, Agent] = dataclasses.field(default_factory=dict)
    gone: Mapping[str, Farewell] = dataclasses.field(default_factory=dict)
    """Agents that were lost, released or refused. None of them ever comes back."""
    left: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """When a node was left because that was asked for, or was lost, if it has not come back."""
    unreleased: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Leavers that still hold their state, by slot: best candidates if their joiner is lost."""
    requests: Mapping[str, Request] = dataclasses.field(default_factory=dict)
    """Nodes to be left, in the order of asking."""
    reports: Mapping[tuple[str, int], Reported] = dataclasses.field(default_factory=dict)
    """By worker and revoked epoch."""
    verified: frozenset[str] = frozenset()
    """Joining workers that hold the state, and have passed no barrier yet."""
    schemas: Mapping[int, Schema] = dataclasses.field(default_factory=dict)
    """What each rank tracks, once the first world is formed."""
    roles: Roles = ()
    """The slots of each role, once the first world is formed."""
    retakes: int = 0
    """How often the script has failed where it was run again in the process of a standby."""
    stubborn: str = ""
    """Why the script cannot be run twice in one process, "" as long as nothing is known."""
    keepers: tuple[int, ...] = ()
    """Who keeps whose records, by rank, once a vote has shown which ranks are replicas."""
    copies: int = 0
    """On how many other nodes all keep copies of what they hold, since a rank has no replica."""
    placing: Placing = Placing.UNKNOWN
    """How a joiner's loader goes to its position: on the rank where that is the slowest."""
    finished: frozenset[int] = frozenset()
    """Ranks whose script has ended well."""
    floor: int | None = None
    """The step that was decided and that not every rank has reported reached."""
    crashes: Mapping[int, Crashes] = dataclasses.field(default_factory=dict)
    """By slot: what would go on for ever must not use up all nodes there are."""
    breaks: Breaks | None = None
    """The last world that broke with nobody lost."""
    begun: int = NO_STEP
    """The step after which the present run began: that of a checkpoint on storage, if any."""
    held: int = 0
    """The last epoch whose world every rank has passed into, 0 if none since the last start."""
    relinked: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """When a pair of agents last had a link opened afresh."""
    opened: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Links opened since all have passed a world: the pair of workers, and for which epoch."""
    stumbles: int = 0
    """Attempts at a world since the last one that held, in which nobody was lost."""
    acted: Mapping[int, Acts] = dataclasses.field(default_factory=dict)
    """By slot: moves that nobody asked for, since its node was slow."""
    slow: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """When a node was moved away from for slowness: no standby, unless somebody says it is well."""
    strange: int = 0
    """Standbys in a row that were lent to it and could not run what it runs."""
    unfit: int = 0
    """Standbys in a row that were let go because they could not rehearse the script."""
    ordered: Ordered = dataclasses.field(default_factory=Ordered)
    incidents: tuple[Incident, ...] = ()
    """The newest moves and failures, and when what happened in them."""

    # --- who --------------------------------------------------------------------------------------

    def is_alive(self, agent: str) -> bool:
        """Return whether the agent is of the job and its workers are not known to be gone."""
        found = self.agents.get(agent)
        return found is not None and found.exit is None

    def has_met(self, agent: str) -> bool:
        """Return whether the agent is, or ever was, of the job."""
        return agent in self.agents or agent in self.gone

    def vacant(self) -> tuple[int, ...]:
        """Return the slots that nobody alive holds."""
        return tuple(slot for slot, agent in enumerate(self.slots) if not self.is_alive(agent))

    def workers(self, agents: Iterable[str]) -> list[str]:
        """Return the workers of `agents`."""
        return [worker_of(agent, local) for agent in agents for local in range(self.nproc)]

    def agent_of(self, worker: str) -> Agent | None:
        """Return the agent whose worker this is, or None for a stranger's."""
        agent = self.agents.get(worker.rpartition("/")[0])
        return agent if agent is not None and worker in self.workers([agent.name]) else None

    def rank_of(self, worker: str) -> int | None:
        """Return the rank that a worker of a seated agent holds."""
        agent = self.agent_of(worker)
        if agent is None or self.slots[agent.slot] != agent.name:
            return None
        return agent.slot * self.nproc + self.workers([agent.name]).index(worker)

    # --- worlds -----------------------------------------------------------------------------------

    @property
    def in_force(self) -> int:
        """The epoch of the world in force, 0 before the first."""
        return 0 if self.plan is None else self.plan.epoch

    def world(self, epoch: int, slots: Iterable[str]) -> Plan:
        """Return the plan of `epoch` with these agents in the slots."""
        members = [
            (worker_of(agent, local), self.agents[agent].node, endpoint)
            for agent in slots
            for local, endpoint in enumerate(self.agents[agent].endpoints)
        ]
        return Plan(
            epoch=epoch,
            members=tuple(
                Member(rank=rank, worker=worker, node=node, endpoint=endpoint)
                for rank, (worker, node, endpoint) in enumerate(members)
            ),
        )

    def standings(self, workers: Iterable[str]) -> list[Reported]:
        """Return the latest word of each worker on where it stands, of those that have reported.

        Epochs and steps only grow; of two equal reports the one on its own epoch is the later,
        since that one froze it. What a worker that was in no world yet holds counts only if it was
        verified for this one: it may be left from a move that came to nothing.
        """
        latest: dict[str, Reported] = {}
        for report in self.reports.values():
            worker = report.worker
            if not report.epoch and worker not in self.verified:
                report = msgspec.structs.replace(report, step=None)
            known = latest.get(worker, report)
            latest[worker] = max(known, report, key=_age)
        return [latest[worker] for worker in workers if worker in latest]


def _age(report: Reported) -> tuple[int, int, bool]:
    step = NO_STEP - 1 if report.step is None else report.step
    return report.epoch, step, report.of == report.epoch


def worker_of(agent: str, local_rank: int) -> str:
    """Return the name of a worker.

    >>> worker_of("node1-0a1b2c3d", 0)
    'node1-0a1b2c3d/0'
    """
    return f"{agent}/{local_rank}"


def lent_name(agent: str) -> str:
    """Return what an agent is called in the job that it is lent to.

    >>> lent_name("node1-0a1b2c3d"), lent_name("node1-0a1b2c3d~1")
    ('node1-0a1b2c3d~1', 'node1-0a1b2c3d~2')
    """
    name, _, times = agent.partition("~")
    return f"{name}~{int(times or 0) + 1}"


def is_own_error(code: int) -> bool:
    """Return whether an exit code says that the script gave up by itself.

    >>> [is_own_error(code) for code in (0, 1, -9, 137, CARRIED_ALONG)]
    [True, True, False, False, False]
    """
    return 0 <= code < _SIGNALLED and code != CARRIED_ALONG
