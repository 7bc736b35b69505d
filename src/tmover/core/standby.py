"""The agents without a place: which of them may take which slot, and which are let go."""

from __future__ import annotations

from tmover.core.draft import RELEASED, Draft
from tmover.core.phase import (
    Accusing,
    Armed,
    Move,
    Preparing,
    Reporting,
    Switching,
    Training,
    Waiting,
)
from tmover.core.roster import Agent, Farewell, Job, Schema, worker_of

FAILURES = 3
"""Bad ends of an agent's workers after which its node is left alone."""


def move_of(job: Job) -> Move | None:
    """Return the planned move that is under way, or whose end is being decided."""
    match job.phase:
        case Preparing(move=move) | Armed(move=move) | Switching(move=move):
            return move
        case Accusing(loss=loss) | Reporting(loss=loss):
            return loss.move
        case _:
            return None


def placed(job: Job) -> set[str]:
    """Return the agents that have a place: members, leavers not yet released, joiners."""
    move = move_of(job)
    return {*job.slots, *job.unreleased.values(), *(move.slots if move else ())} - {""}


def spare(job: Job) -> list[Agent]:
    """Return the standbys, warm or on their way, in the order they came."""
    taken = placed(job)
    return [
        agent for agent in job.agents.values() if agent.exit is None and agent.name not in taken
    ]


def candidates(job: Job, slot: int) -> list[Agent]:
    """Return the warm standbys that could take `slot` now: those that failed least come first."""
    fit = [agent for agent in spare(job) if agent.is_ready and not misfits(job, agent, slot)]
    return sorted(fit, key=lambda agent: (agent.failures, agent.slot != slot))


def misfits(job: Job, agent: Agent, slot: int) -> tuple[str, ...]:
    """Return the tracked names in which a warm standby differs from the ranks of `slot`."""
    wrong: set[str] = set()
    for local in range(job.nproc):
        theirs: Schema = job.schemas.get(slot * job.nproc + local, {})
        ours = agent.schemas.get(worker_of(agent.name, local), {})
        names = theirs.keys() | ours.keys()
        wrong |= {name for name in names if theirs.get(name) != ours.get(name)}
    return tuple(sorted(wrong))


def vacancy(job: Job, first: int | None = None) -> int:
    """Return the slot that a standby which begins now is to rehearse.

    That is one that the job waits for and that no other rehearses already, `first` if it is one of
    those; without any it is the last.
    """
    taken = {agent.slot for agent in spare(job) if agent.node not in job.requests}
    open_ = [slot for slot in _wanted(job) if slot not in taken]
    return first if first in open_ else next(iter(open_), job.nnodes - 1)


def tend(draft: Draft) -> None:
    """Launch, refuse or release the agents without a place, as their state asks for."""
    _drop_idle_requests(draft)
    taken = placed(draft.job)
    for agent in [a for a in draft.job.agents.values() if a.name not in taken]:
        if agent.node in draft.job.requests:
            draft.note(f"{agent.node} is to be left: its standby is released")
            draft.set(left={**draft.job.left, agent.node: draft.at})
            draft.dismiss(agent.name, RELEASED)
        elif agent.has_left:
            part(draft, agent)
        elif agent.exit is not None:
            _relaunch(draft, agent, agent.exit.reason)
        elif agent.is_ready and draft.job.schemas:
            _check(draft, agent)
    _drop_idle_requests(draft)
    _recast(draft)
    if all(draft.job.is_alive(agent) for agent in draft.job.slots):
        draft.order(draft.job.reserve - len(spare(draft.job)))


def _recast(draft: Draft) -> None:
    """Let standbys rehearse a slot that waits for one, if none can take it as it is."""
    for slot in _wanted(draft.job):
        job = draft.job
        usable = [agent for agent in spare(job) if agent.node not in job.requests]
        if any(agent.slot == slot for agent in usable) or candidates(job, slot):
            continue
        others = [agent for agent in usable if agent.is_ready]
        if others:
            name = others[0].node
            draft.note(f"{name} rehearses slot {slot} now: no standby could take it as it is")
            draft.relaunch(others[0], slot=slot, sandbox=True)


def _wanted(job: Job) -> list[int]:
    """Return the slots that are to be taken by a standby now."""
    if isinstance(job.phase, Waiting):
        return list(job.vacant())
    if not isinstance(job.phase, Training):
        return []
    asked = {agent.name for agent in job.agents.values() if agent.node in job.requests}
    return [slot for slot, name in enumerate(job.slots) if name in asked]


def part(draft: Draft, agent: Agent) -> None:
    """Let an agent go that has ended by itself; its node need not be fenced."""
    reason = "its agent has ended" if agent.exit is None else agent.exit.reason
    draft.note(f"{agent.node} has left: {reason}")
    draft.dismiss(agent.name, Farewell(1, f"it left: {reason}"))


def _drop_idle_requests(draft: Draft) -> None:
    """Forget the requests about nodes that have no agent any more."""
    nodes = {agent.node for agent in draft.job.agents.values()}
    kept = {node: request for node, request in draft.job.requests.items() if node in nodes}
    draft.set(requests=kept)


def _relaunch(draft: Draft, agent: Agent, reason: str) -> None:
    ended = f"the workers on {agent.node} ended ({reason})"
    if agent.failures >= FAILURES:
        draft.note(f"{ended} {agent.failures} times: it is no standby any more")
        _let_go(draft, agent, Farewell(1, f"its workers ended {agent.failures} times: {reason}"))
        return
    slot = vacancy(draft.job, agent.slot)
    waits = isinstance(draft.job.phase, Waiting)
    what = f"for slot {slot}" if waits else "as a standby"
    draft.note(f"{ended}: they are started afresh {what}")
    draft.relaunch(agent, slot=slot, sandbox=True)


def _check(draft: Draft, agent: Agent) -> None:
    """Refuse a standby that tracks something else than the ranks it rehearses to replace."""
    wrong = misfits(draft.job, agent, agent.slot)
    if not wrong:
        draft.set(unfit=0)
        return
    names = ", ".join(f"`{name}`" for name in wrong)
    reason = (
        f"the standby on {agent.node} does not fit the job: tracked {names} "
        f"differ{'s' * (len(wrong) == 1)}; start it with the job's own script and arguments"
    )
    draft.note(reason)
    _let_go(draft, agent, Farewell(2, reason))


def _let_go(draft: Draft, agent: Agent, farewell: Farewell) -> None:
    draft.dismiss(agent.name, farewell)
    draft.count_unfit()
