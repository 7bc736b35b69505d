"""What `tmover status` shows of a job: names and words, no decision.

Steps and the time since an agent was heard are not here: they come with heartbeats, on which no
decision depends.
"""

from __future__ import annotations

import dataclasses

from tmover.core import roles, standby, waiting
from tmover.core.incident import Incident
from tmover.core.phase import Ended, Recovering, Waiting
from tmover.core.roster import Agent, Job
from tmover.core.warmth import Warmth, coldest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One place in the job."""

    slot: int
    node: str
    """"" while nobody holds the slot."""
    agent: str
    state: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StandbyView:
    """One node without a place."""

    node: str
    agent: str
    state: str
    slot: int
    """The one it rehearses, or has rehearsed last."""
    takes: tuple[int, ...]
    """The slots it could take as it is."""
    rehearsed: tuple[int, ...]
    """The slots whose roles its processes have rehearsed: these it can take after a rehearsal."""
    rebuilds: str
    """Why it must rehearse a slot before it takes it, "" if it need not or that is not known."""
    warmth: Warmth | None = None
    """The least of what its workers have."""
    warm_at: float = 0.0
    """When that was said last, by the controller's wall clock."""
    recorded: str = ""
    """What its rehearsal was answered from; "" before it is over."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoveView:
    """The move under way, or asked for and waiting for a standby."""

    phase: str
    leaver: str
    """Nodes, joined by commas."""
    joiner: str
    """Nodes; "" while none is found."""
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaitView:
    """What a job waits for that stands still."""

    since: float
    slots: tuple[int, ...]
    tried: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One job as a person wants to see it."""

    job: str
    owner: str
    phase: str
    epoch: int
    world_size: int
    slots: tuple[SlotView, ...]
    standbys: tuple[StandbyView, ...]
    move: MoveView | None
    outcome: str
    """How it ended, "" before."""
    code: int | None
    redundancy: str
    """Where a lost rank's state comes from: "replicas" or "copies"; "" before that is known."""
    copies: int
    """On how many other nodes copies of each rank are kept, 0 if none are needed."""
    placing: str
    """How a joiner's loader goes to its position: a `Placing`."""
    waiting: WaitView | None
    """None unless it stands still for want of a node."""
    incidents: tuple[Incident, ...]


def view(job: Job) -> View:
    """Return what is to be shown of a job."""
    ended = job.phase if isinstance(job.phase, Ended) else None
    return View(
        job=job.name,
        owner=job.owner,
        phase=job.phase.stage.value,
        epoch=job.in_force,
        world_size=job.nnodes * job.nproc,
        slots=tuple(_slot(job, slot, name) for slot, name in enumerate(job.slots)),
        standbys=_standbys(job),
        move=_move(job),
        outcome="" if ended is None else ended.reason,
        code=None if ended is None else ended.code,
        redundancy="copies" if job.copies else "replicas" if job.keepers else "",
        copies=job.copies,
        placing=job.placing.value,
        waiting=_waiting(job),
        incidents=job.incidents,
    )


def _waiting(job: Job) -> WaitView | None:
    if not isinstance(job.phase, Waiting):
        return None
    return WaitView(since=job.phase.since, slots=job.vacant(), tried=waiting.tried(job))


def _slot(job: Job, slot: int, name: str) -> SlotView:
    agent = job.agents.get(name)
    if agent is None:
        return SlotView(slot=slot, node="", agent="", state="lost" if name else "vacant")
    state = "leaving" if agent.node in job.requests else agent.state
    if isinstance(job.phase, Ended):
        state = "ended"
    return SlotView(slot=slot, node=agent.node, agent=agent.name, state=state)


def _standbys(job: Job) -> tuple[StandbyView, ...]:
    if isinstance(job.phase, Ended):
        return ()
    move = standby.move_of(job)
    joiners = () if move is None else move.joiners
    return tuple(
        StandbyView(
            node=agent.node,
            agent=agent.name,
            state="joining" if agent.name in joiners else agent.state,
            slot=agent.slot,
            takes=tuple(s for s in range(len(job.slots)) if standby.takes(job, agent, s)),
            rehearsed=_rehearsed(job, agent),
            rebuilds=job.stubborn or agent.obstacle,
            warmth=coldest(agent.warmth.values()) if agent.is_ready else None,
            warm_at=agent.warm_at,
            recorded=" | ".join(dict.fromkeys(filter(None, agent.recorded.values()))),
        )
        for agent in job.agents.values()
        if agent.name not in job.slots and agent.name not in job.unreleased.values()
    )


def _rehearsed(job: Job, agent: Agent) -> tuple[int, ...]:
    """Return the slots of the roles that a standby's processes have rehearsed."""
    known = {roles.role_of(job.roles, slot) for slot in agent.rehearsed}
    return tuple(sorted(s for n, slots in enumerate(job.roles) if n in known for s in slots))


def _move(job: Job) -> MoveView | None:
    move, phase = standby.move_of(job), job.phase.stage.value
    if move is not None:
        leavers = [job.agents[a].node for a in move.leavers.values() if a in job.agents]
        joiners = [job.agents[a].node for a in move.joiners if a in job.agents]
        return _shown(phase, leavers, joiners, move.epoch)
    if isinstance(job.phase, Recovering):
        names = dict.fromkeys(worker.rpartition("/")[0] for worker in job.phase.sources)
        nodes = [job.agents[name].node for name in names]
        return _shown(phase, [], nodes, job.in_force)
    wanted = [node for node in job.requests if not isinstance(job.phase, Ended)]
    return _shown("requested", wanted, [], 0) if wanted else None


def _shown(phase: str, leavers: list[str], joiners: list[str], epoch: int) -> MoveView:
    return MoveView(phase=phase, leaver=",".join(leavers), joiner=",".join(joiners), epoch=epoch)
