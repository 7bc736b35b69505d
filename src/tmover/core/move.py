"""A planned move: a standby takes the place of a node that still works, and nothing is lost.

Until `Arm` a move can be called off by a word. From then on a rank may have passed its commit
barrier, so that giving up means to revoke the epoch and to ask. The leaver keeps its state until
every rank has reported passed.
"""

from __future__ import annotations

import dataclasses

from tmover.core import epoch as epochs
from tmover.core import links, replicas, standby
from tmover.core.draft import RELEASED, Draft
from tmover.core.events import (
    Entered,
    MoveRequested,
    Passed,
    Prepared,
    PrepareFailed,
    Verified,
    Wait,
)
from tmover.core.orders import Arm, Done, Prepare
from tmover.core.phase import (
    Armed,
    Move,
    Preparing,
    Recovering,
    Switching,
    Training,
)
from tmover.core.roster import Request

# --- what is heard --------------------------------------------------------------------------------


def request(draft: Draft, event: MoveRequested) -> None:
    """Note which nodes are to be left."""
    nodes = {agent.node for agent in draft.job.agents.values()}
    for node in (event.node, *event.more):
        if node not in nodes:
            draft.note(f"{node} carries nothing of this job: nothing to move")
        elif node not in draft.job.requests:
            draft.note(f"{node} is to be left: {event.reason}")
            draft.set(requests={**draft.job.requests, node: Request(event.reason)})


def welcome_back(draft: Draft, node: str) -> None:
    """Forget why a node was not to be used. A move that has begun is not called off."""
    job = draft.job
    planned = standby.move_of(job)
    moving = () if planned is None else planned.leavers.values()
    is_moving = any(job.agents[name].node == node for name in moving if name in job.agents)
    if is_moving:
        draft.note(f"{node} is being left: it can be used again after the move, ask then")
        return
    if node not in {*job.requests, *job.left, *job.slow}:
        return
    draft.set(
        requests={name: asked for name, asked in job.requests.items() if name != node},
        left={name: at for name, at in job.left.items() if name != node},
        slow={name: at for name, at in job.slow.items() if name != node},
    )
    draft.note(f"{node} may be used again")


def prepared(draft: Draft, event: Prepared) -> None:
    """Note that a worker is ready to switch."""
    phase = draft.job.phase
    if isinstance(phase, Preparing) and event.epoch == phase.move.epoch:
        draft.set(phase=dataclasses.replace(phase, prepared=phase.prepared | {event.worker}))


def prepare_failed(draft: Draft, event: PrepareFailed) -> None:
    """Give the epoch up that a worker could not prepare."""
    if epochs.has_part(draft.job, event.worker, event.epoch):
        epochs.suspect(draft, event.epoch, f"{event.worker} could not prepare: {event.reason}")


def progress(draft: Draft, event: Entered | Verified | Passed) -> None:
    """Note how far a worker has come in a switch. Verified counts even if it is revoked by now."""
    job, planned = draft.job, standby.move_of(draft.job)
    crossing = job.in_force if planned is None else planned.epoch
    if event.epoch != crossing or not epochs.has_part(job, event.worker, crossing):
        return
    if isinstance(job.phase, Armed):
        draft.set(phase=Switching(move=job.phase.move))
        draft.note(f"all switch to epoch {event.epoch} after step {event.step}")
        draft.arm(Wait.SWITCH, event.epoch)
    phase = draft.job.phase
    if isinstance(event, Passed) and isinstance(phase, Switching | Recovering):
        draft.set(phase=dataclasses.replace(phase, passed=phase.passed | {event.worker}))
    elif isinstance(event, Verified):
        draft.set(verified=job.verified | {event.worker})


# --- what follows from it -------------------------------------------------------------------------


def begin(draft: Draft) -> None:
    """Prepare a move for the nodes that are to be left, as far as there are standbys for them."""
    job = draft.job
    if job.finished:
        return
    leavers = {
        slot: name
        for node in job.requests  # first asked, first served
        for slot, name in enumerate(job.slots)
        if job.agents[name].node == node
    }
    slots, taken = list(job.slots), set[str]()
    for slot in leavers:
        fit = [
            agent
            for agent in standby.candidates(job, slot)
            if agent.name not in taken and agent.node not in job.requests
        ]
        if fit:
            slots[slot] = fit[0].name
            taken.add(fit[0].name)
    leavers = {slot: agent for slot, agent in leavers.items() if slots[slot] != agent}
    missing = sum(job.agents[a].node in job.requests for a in slots)
    staying = [agent for agent in standby.spare(job) if agent.node not in job.requests]
    draft.order(missing - (len(staying) - len(taken)))
    if leavers:
        _prepare(draft, tuple(slots), leavers)


def advance_preparing(draft: Draft, move: Move, ready: frozenset[str]) -> None:
    """Arm everybody once all are prepared, or call the move off."""
    job = draft.job
    if job.vacant():
        epochs.call_off(draft, move, "a member was lost")
    elif not all(map(job.is_alive, move.joiners)):
        epochs.call_off(draft, move, "a joiner was lost")
    elif any(job.agents[name].node in job.requests for name in move.joiners):
        epochs.call_off(draft, move, "a joiner's node is to be left")
    elif job.finished:
        epochs.call_off(draft, move, "a rank has finished")
    elif ready.issuperset(job.workers([*job.slots, *move.joiners])):
        draft.set(phase=Armed(move=move))
        draft.note(f"all are prepared for epoch {move.epoch}")
        for name in (*job.slots, *move.joiners):
            draft.do(Arm(job=job.name, agent=name, epoch=move.epoch))


def advance_armed(draft: Draft, move: Move) -> None:
    """Revoke what can no longer be, now that somebody may have switched."""
    job = draft.job
    if job.vacant():
        epochs.revoke(draft, (move.epoch, job.in_force), "a member was lost", move)
    elif not all(map(job.is_alive, move.joiners)):
        epochs.revoke(draft, (move.epoch,), "a joiner was lost", move)
    elif job.finished:
        epochs.revoke(draft, (move.epoch,), "a rank has finished", move)


def advance_switching(draft: Draft, phase: Switching) -> None:
    """Finish the move when all have passed, or revoke what can no longer be."""
    job, move = draft.job, phase.move
    handed_over = job.verified.issuperset(move.sources)
    lost = [slot for slot in job.vacant() if not (handed_over and slot in move.leavers)]
    if lost:
        why = (
            "a leaver was lost before its hand-off"
            if lost[0] in move.leavers
            else "a member was lost"
        )
        epochs.revoke(draft, (move.epoch, job.in_force), why, move)
    elif not all(map(job.is_alive, move.joiners)):
        epochs.revoke(draft, (move.epoch,), "a joiner was lost", move)
    elif phase.passed.issuperset(job.workers(move.slots)):
        adopt(draft, move)
        complete(draft)


def overdue(draft: Draft, phase: Preparing | Armed | Switching) -> None:
    """Give up a move that took too long; it is tried again."""
    what = "switch" if isinstance(phase, Switching) else "prepare"
    why = f"it took too long to {what}"
    if isinstance(phase, Preparing):
        epochs.call_off(draft, phase.move, why, counts=True)
    else:
        epochs.revoke(draft, (phase.move.epoch,), why, phase.move)


def adopt(draft: Draft, move: Move) -> None:
    """Put the world of `move` in force. Its leavers keep their state until it is complete."""
    job = draft.job
    unreleased = {s: a for s, a in move.leavers.items() if job.is_alive(a)}
    draft.set(
        plan=move.plan,
        slots=move.slots,
        unreleased={**job.unreleased, **unreleased},
        opened=links.opened(job, move.plan, job.workers(move.joiners)),
    )
    for slot in move.leavers:
        name = move.slots[slot]
        if name in draft.job.agents:
            draft.put(draft.job.agents[name], slot=slot, sandbox=False)


def complete(draft: Draft) -> None:
    """Every rank has passed into the world in force: let the leavers go, and train on."""
    job = draft.job
    epoch = job.in_force
    leavers = draft.living(job.unreleased.values())
    for name in (*job.slots, *leavers):
        draft.do(Done(job=job.name, agent=name, epoch=epoch))
    draft.set(phase=Training(), unreleased={}, reports={}, floor=None, stumbles=0)
    draft.set(verified=frozenset(), held=epoch, opened={})
    draft.note(f"all ranks have passed into epoch {epoch}")
    for name in leavers:
        draft.set(left={**draft.job.left, draft.job.agents[name].node: draft.at})
        draft.dismiss(name, RELEASED)


def _prepare(draft: Draft, slots: tuple[str, ...], leavers: dict[int, str]) -> None:
    epoch = draft.next_epoch()
    job = draft.job
    plan = job.world(epoch, slots)
    sources = dict(
        pair
        for slot, leaver in leavers.items()
        for pair in zip(job.workers([slots[slot]]), job.workers([leaver]), strict=True)
    )
    seated = job.workers(slots)
    known = () if job.copies else job.keepers
    helpers = replicas.helpers(sources, seated, known, fit=seated)
    move = Move(plan=plan, slots=slots, leavers=leavers, sources=sources, helpers=helpers)
    for slot, leaver in leavers.items():
        pair = f"{job.agents[leaver].node} to {job.agents[slots[slot]].node}"
        draft.note(f"slot {slot} moves from {pair} in epoch {epoch}")
    draft.set(phase=Preparing(move=move))
    for name in (*job.slots, *move.joiners):
        draft.do(Prepare(job=job.name, agent=name, plan=plan, sources=sources, helpers=helpers))
    draft.arm(Wait.PREPARE, epoch)
