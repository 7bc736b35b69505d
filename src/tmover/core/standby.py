"""The agents without a place: which of them may take which slot, and which are let go.

A standby is *general*: it rehearses each role of the job in turn, in the same processes (`recast`),
and rests in the commonest. There it may take its own slot, and the others of that role if it has
proven that what the script has made of its rank can be changed in place. Any other slot it can take
is first rehearsed.
"""

from __future__ import annotations

from tmover.core import roles
from tmover.core.draft import RELEASED, Draft
from tmover.core.events import Warm
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
from tmover.core.roles import Schema
from tmover.core.roster import Agent, Exit, Farewell, Job, worker_of

FAILURES = 3
"""Bad ends of an agent's workers after which its node is left alone."""

RETAKES = 2
"""Failures of a script that is run again in its process after which no standby does that."""


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


def has_place(job: Job, agent: str) -> bool:
    """Return whether an agent is among the placed."""
    move = move_of(job)
    return (
        agent in job.slots
        or agent in job.unreleased.values()
        or (move is not None and agent in move.slots)
    )


def spare(job: Job) -> list[Agent]:
    """Return the standbys, warm or on their way, in the order they came."""
    taken = placed(job)
    return [
        agent for agent in job.agents.values() if agent.exit is None and agent.name not in taken
    ]


def candidates(job: Job, slot: int) -> list[Agent]:
    """Return the warm standbys that could take `slot` now, those last that are slow or failed."""
    fit = [agent for agent in spare(job) if takes(job, agent, slot)]
    return sorted(fit, key=lambda a: (a.node in job.slow, a.failures, a.slot != slot))


def takes(job: Job, agent: Agent, slot: int) -> bool:
    """Return whether a standby can take `slot` as it is: it need not rehearse it first."""
    if agent.doubted or not agent.is_ready or not agent.sandbox or misfits(job, agent, slot):
        return False
    return agent.slot == slot or agent.is_proven


def misfits(job: Job, agent: Agent, slot: int) -> tuple[str, ...]:
    """Return the tracked names in which a warm standby differs from the ranks of `slot`."""
    wrong: set[str] = set()
    for local in range(job.nproc):
        theirs: Schema = job.schemas.get(slot * job.nproc + local, {})
        ours = agent.schemas.get(worker_of(agent.name, local), {})
        names = theirs.keys() | ours.keys()
        wrong |= {name for name in names if theirs.get(name) != ours.get(name)}
    return tuple(sorted(wrong))


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
    _rehearse_wanted(draft)
    _rehearse_on(draft)
    if all(draft.job.is_alive(agent) for agent in draft.job.slots):
        draft.order(draft.job.reserve - len(spare(draft.job)))


def hear_warm(draft: Draft, agent: Agent, event: Warm) -> None:
    """Note that a worker of a standby has rehearsed, and what it has proven."""
    schemas = {**agent.schemas, event.worker: event.schema}
    proofs = agent.proofs
    if event.proof is not None:
        proofs = {**proofs, event.worker: event.proof}
    if agent.lent_by:
        draft.set(strange=0)
    rehearsed = agent.rehearsed | {agent.slot}
    recorded = {**agent.recorded, event.worker: event.recorded}
    warmth = agent.warmth
    if event.warmth is not None:
        warmth = {**warmth, event.worker: event.warmth}
    draft.put(
        agent,
        schemas=schemas,
        proofs=proofs,
        rehearsed=rehearsed,
        recorded=recorded,
        warmth=warmth,
        warm_at=draft.at,
    )


def hear_exit(draft: Draft, agent: Agent, end: Exit) -> None:
    """Note how an agent's workers ended. A script that fails where it is run again is no failure.

    Not of the node, that is. Once may be a whim of the moment: made-up values, a full disk. Twice,
    on whatever nodes, and it cannot be run twice in a process, and from now on is not.
    """
    is_again = agent.cast > 0 and agent.sandbox and not agent.is_ready and not end.is_death
    if is_again:
        draft.set(retakes=draft.job.retakes + 1)
        draft.note(f"the script failed when it was run again in one process: {end.reason}")
    if is_again and draft.job.retakes == RETAKES:
        draft.note(f"it has failed so {RETAKES} times: it is run in fresh processes from now on")
        draft.set(stubborn=end.reason)
    draft.put(agent, exit=end, failures=agent.failures + (not is_again))


def _rehearse_wanted(draft: Draft) -> None:
    """Let standbys rehearse a slot that waits for one, if none can take it as it is."""
    for slot in wanted(draft.job):
        job = draft.job
        usable = [agent for agent in spare(job) if agent.node not in job.requests]
        if any(agent.doubted or (agent.slot == slot and agent.cast) for agent in usable):
            continue  # whoever starts afresh takes longer than who is recast, or has to answer
        if candidates(job, slot):
            continue
        others = [agent for agent in usable if agent.is_ready]
        if others:
            name = others[0].node
            draft.note(f"{name} rehearses slot {slot} now: no standby could take it as it is")
            _rehearse(draft, others[0], slot)


def _rehearse(draft: Draft, agent: Agent, slot: int) -> None:
    """Have a standby rehearse a slot, in the same processes if the script bears it."""
    if draft.job.stubborn or agent.exit is not None:
        draft.relaunch(agent, slot=slot, sandbox=True)
    else:
        draft.recast(agent, slot=slot, prove=False)


def _rehearse_on(draft: Draft) -> None:
    """Send the standbys that wait, and for whom nobody waits, on to what they have yet to rehearse.

    A script that cannot be run twice in a process rests where it is: it costs all to go on.
    """
    if draft.job.stubborn or not isinstance(draft.job.phase, Training):
        return
    for agent in spare(draft.job):
        idle = agent.is_ready and agent.sandbox and agent.node not in draft.job.requests
        if idle and not agent.doubted and (stop := next_stop(draft.job, agent)) is not None:
            slot, prove = stop
            what = "to prove that it can change ranks" if prove else "to know that role, too"
            draft.note(f"{agent.node} rehearses slot {slot} now, {what}")
            draft.recast(agent, slot=slot, prove=prove)


def next_stop(job: Job, agent: Agent) -> tuple[int, bool] | None:
    """Return the slot a standby rehearses next, and whether it is to prove something on its way.

    None if it rests.
    """
    present = roles.role_of(job.roles, agent.slot)
    if present is None:
        return None
    visited = {roles.role_of(job.roles, slot) for slot in agent.rehearsed}
    left = roles.unvisited(job.roles, {each for each in visited if each is not None})
    if left:
        return job.roles[left[0]][0], False
    resting = roles.resting(job.roles, present)
    if resting != present:
        return job.roles[resting][0], False
    companion = roles.companion(job.roles[present], agent.slot)
    if companion is None or agent.proofs:
        return None
    return companion, True


def first_stop(job: Job, own: int | None = None) -> int:
    """Return the slot that a new standby rehearses: one that waits, the last if none does.

    Of several the one that fewest rehearse already; `own` before all others, if it is one of them.
    """
    vacant = wanted(job)
    if own in vacant:
        return vacant[vacant.index(own)]
    coming = [agent.slot for agent in spare(job) if agent.node not in job.requests]
    return min(vacant, key=coming.count, default=job.nnodes - 1)


def wanted(job: Job) -> list[int]:
    """Return the slots that are to be taken by a standby now."""
    if isinstance(job.phase, Waiting):
        return list(job.vacant())
    if not isinstance(job.phase, Training):
        return []
    asked = {agent.name for agent in job.agents.values() if agent.node in job.requests}
    return [slot for slot, name in enumerate(job.slots) if name in asked]


def part(draft: Draft, agent: Agent) -> None:
    """Let an agent go that has ended by itself; its node need not be fenced.

    One that was lent, and cannot run what this job runs, says so before it has rehearsed.
    """
    reason = "its agent has ended" if agent.exit is None else agent.exit.reason
    draft.note(f"{agent.node} has left: {reason}")
    draft.dismiss(agent.name, Farewell(1, f"it left: {reason}"))
    if agent.lent_by and not agent.rehearsed and agent.exit is not None and agent.exit.code > 0:
        draft.set(strange=draft.job.strange + 1)


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
    slot = first_stop(draft.job, agent.slot)
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
