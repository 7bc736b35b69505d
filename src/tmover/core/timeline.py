"""What became of a job's moves and failures, and when: one incident each, from events alone.

An incident begins when training is disturbed and ends when all train again, or the job ends. It is
found by comparing a job before and after an event, so that a journal gives the same again. Times
are the controller's wall clock.
"""

from __future__ import annotations

import msgspec

from tmover.core import blame, standby
from tmover.core.draft import Draft
from tmover.core.events import (
    AnyEvent,
    Broken,
    Exited,
    Joined,
    Launched,
    LeaseExpired,
    Left,
    MoveRequested,
    NodeLost,
    Reported,
    Stepped,
    Stuck,
    Verified,
    Warm,
)
from tmover.core.incident import Handing, Incident, Lost, Mark
from tmover.core.orders import Abort, Arm, Assign, OrderNode, Prepare, Store
from tmover.core.phase import (
    Accusing,
    Armed,
    Ended,
    Forming,
    New,
    Preparing,
    Recovering,
    Reporting,
    Starting,
    Storing,
    Switching,
    Training,
    Waiting,
)
from tmover.core.roster import Job

KEPT = 32
"""So many incidents of a job are kept, the newest ones."""
MARKS = 64
"""So many marks of one incident are kept, the first ones."""


def keep(draft: Draft, before: Job, event: AnyEvent) -> None:
    """Add to the job's incidents what an event has changed about them."""
    job = draft.job
    incidents = job.incidents
    if incidents and isinstance(event, Stepped) and event.epoch == incidents[-1].into:
        if not any(mark.name == "first step" for mark in incidents[-1].marks):
            now = _marked(incidents[-1], ["first step"], event.at)
            draft.set(incidents=(*incidents[:-1], now))
        return
    if job is before and not draft.actions:
        return  # it came late, or twice
    is_open = bool(incidents) and not incidents[-1].outcome
    if not is_open and _is_disturbed(job) and not _is_disturbed(before):
        incidents = (*incidents[-KEPT + 1 :], _begun(before, event, _kind(job)))
    elif not is_open:
        return
    changed = _changed(incidents[-1], draft, before, event)
    if changed != incidents[-1] or not is_open:
        draft.set(incidents=(*incidents[:-1], changed))


def _is_disturbed(job: Job) -> bool:
    """Return whether a world that was formed is given up or being left."""
    return not isinstance(job.phase, New | Forming | Starting | Training | Ended)


def _kind(job: Job) -> str:
    return "move" if isinstance(job.phase, Preparing | Armed | Switching) else "failure"


def _begun(job: Job, event: AnyEvent, kind: str) -> Incident:
    agents = [job.agents.get(name) for name in job.slots]
    return Incident(
        number=1 + (job.incidents[-1].number if job.incidents else 0),
        kind=kind,
        began=event.at,
        cause=_cause(job, event, kind),
        epoch=job.in_force,
        holders=tuple(("", "", 0) if a is None else (a.name, a.node, a.launch) for a in agents),
        idle=tuple(agent.name for agent in standby.spare(job)),
    )


def _cause(job: Job, event: AnyEvent, kind: str) -> str:
    """Return what an event says, in words."""
    match event:
        case MoveRequested(node=node, reason=reason) | NodeLost(node=node, reason=reason):
            return f"{node}: {reason}"
        case Exited(agent=agent, reason=reason) | Left(agent=agent, reason=reason):
            return f"{_node(job, agent)}: {reason}"
        case Stuck(agent=agent, reason=reason):
            return f"{_node(job, agent)}: {reason}"
        case LeaseExpired(agent=agent):
            return f"{_node(job, agent)}: its agent was not heard of for the lease"
        case Broken(worker=worker, reason=reason):
            return f"{worker}: {reason}"
        case Reported(worker=worker):
            return f"{worker}: it reported that its world is broken"
    if kind == "move":
        return "; ".join(f"{node}: {asked.reason}" for node, asked in job.requests.items())
    return type(event).__name__


def _why(job: Job, agent: str) -> str:
    """Return why an agent that is not alive was lost."""
    known = job.agents.get(agent)
    end = job.gone.get(agent) if known is None else known.exit
    return "" if end is None else end.reason.removeprefix("lost: ")


def _node(job: Job, agent: str) -> str:
    return job.agents[agent].node if agent in job.agents else agent


def _changed(incident: Incident, draft: Draft, before: Job, event: AnyEvent) -> Incident:
    """Return the incident after an event."""
    job = draft.job
    incident = _marked(incident, _names(draft, before, event), event.at)
    if isinstance(job.phase, Accusing | Reporting):
        saw = [accusation.accuser for accusation in job.phase.loss.accusations]
        witnesses = tuple(dict.fromkeys([*incident.witnesses, *saw]))
        incident = msgspec.structs.replace(incident, witnesses=witnesses)
    if isinstance(event, Verified):
        incident = msgspec.structs.replace(
            incident,
            connect_s=max(incident.connect_s, event.connect_s),
            receive_s=max(incident.receive_s, event.receive_s),
        )
    gone = [
        Lost(node, _why(job, agent))
        for agent, node, _ in incident.holders
        if agent and not job.is_alive(agent) and node not in {known.node for known in incident.lost}
    ]
    if incident.kind == "move" and not isinstance(job.phase, Preparing | Armed | Switching):
        gone = [] if isinstance(job.phase, Training) else gone
    lost = (*incident.lost, *gone)
    kind = "move" if incident.kind == "move" and not lost else "failure"
    incident = msgspec.structs.replace(incident, lost=lost, kind=kind)
    outcome = _outcome(incident, job)
    return incident if not outcome else _closed(incident, job, outcome)


def _outcome(incident: Incident, job: Job) -> str:
    if isinstance(job.phase, Ended):
        return f"ended with {job.phase.code}: {job.phase.reason}"
    if not isinstance(job.phase, Training):
        return ""
    if any(mark.name == "started afresh" for mark in incident.marks):
        return "started afresh"
    if job.in_force == incident.epoch:
        return "called off"
    return "moved" if incident.kind == "move" else "recovered"


def _closed(incident: Incident, job: Job, outcome: str) -> Incident:
    into = job.in_force if isinstance(job.phase, Training) else 0
    return msgspec.structs.replace(
        incident,
        outcome=outcome,
        into=0 if outcome == "called off" else into,
        handings=_handings(incident, job) if into else (),
        holders=(),
        idle=(),
    )


def _handings(incident: Incident, job: Job) -> tuple[Handing, ...]:
    """Return which slots are held by others than before, or by fresh workers."""
    found = []
    for slot, name in enumerate(job.slots):
        was, node, launch = incident.holders[slot]
        now = job.agents[name]
        if (was, launch) == (name, now.launch):
            continue
        came = "lent" if now.lent_by else "new node"
        path = "same node" if was == name else "standby" if name in incident.idle else came
        found.append(Handing(slot, node, now.node, path))
    return tuple(found)


def _names(draft: Draft, before: Job, event: AnyEvent) -> list[str]:
    """Return what an event brought about, in the order of a usual incident."""
    was, now = before.phase, draft.job.phase
    kinds = {type(action) for action in draft.actions}
    named = {
        "node came": isinstance(event, Joined) and event.agent not in before.agents,
        "workers up": isinstance(event, Launched) and _is_awaited(draft.job, event.agent),
        "warm": isinstance(event, Warm) and _is_awaited(draft.job, blame.agent_of(event.worker)),
        "lost named": isinstance(now, Reporting) and not isinstance(was, Reporting),
        "waiting": isinstance(now, Waiting) and not isinstance(was, Waiting),
        "node ordered": OrderNode in kinds,
        "workers started again": _is_relaunched(before, draft.job),
        "started afresh": isinstance(now, Forming) and not isinstance(was, Forming),
        "called off": Abort in kinds and isinstance(was, Preparing | Armed | Reporting),
        "decided": Assign in kinds or Prepare in kinds,
        "armed": Arm in kinds,
        "at the boundary": isinstance(now, Switching) and not isinstance(was, Switching),
        "handed over": isinstance(event, Verified) and event.worker in draft.job.verified,
        "storing": Store in kinds and isinstance(now, Storing),
        "passed": isinstance(now, Training) and not isinstance(was, Training | Preparing),
    }
    return [name for name, holds in named.items() if holds]


def _is_awaited(job: Job, agent: str) -> bool:
    return isinstance(job.phase, Waiting | Recovering) and agent in job.agents


def _is_relaunched(before: Job, job: Job) -> bool:
    """Return whether workers of an agent that was of the job are started again, for a slot."""
    if not isinstance(job.phase, Waiting):
        return False
    known = [(before.agents.get(name), agent) for name, agent in job.agents.items()]
    return any(was is not None and was.launch < agent.launch for was, agent in known)


def _marked(incident: Incident, names: list[str], at: float) -> Incident:
    marks = (*incident.marks, *(Mark(name, at) for name in names))[:MARKS]
    return msgspec.structs.replace(incident, marks=marks)
