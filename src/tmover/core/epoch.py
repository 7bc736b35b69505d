"""How an epoch is given up: aborted while nobody is armed for it, revoked afterwards.

An aborted epoch is over at once. A revoked one is over when every survivor has reported where it
stands, and not before: a vote or a barrier of it may have passed on some ranks and not on others,
and only the reports tell. Blame is settled meanwhile, so that it is known who the survivors are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Union

from tmover.core import blame
from tmover.core.draft import Draft
from tmover.core.events import Answered, Broken, Reported, Stuck, Wait
from tmover.core.orders import Abort, Probe, Revoke
from tmover.core.phase import (
    Accusation,
    Accusing,
    Armed,
    Loss,
    Move,
    Preparing,
    Recovering,
    Reporting,
    Starting,
    Switching,
    Training,
)
from tmover.core.roster import Job
from tmover.core.standby import candidates, move_of

Revoked = Union[Accusing, Reporting]
ATTEMPTS = 3
"""Moves tried for one request before it is dropped."""


# --- giving up ------------------------------------------------------------------------------------


def call_off(draft: Draft, move: Move, why: str, *, counts: bool = False) -> None:
    """Abort a planned move that nobody can have passed: training goes on as before."""
    job = draft.job
    draft.note(f"the move to epoch {move.epoch} is called off: {why}")
    for name in draft.living([*job.slots, *move.joiners]):
        draft.do(Abort(job=job.name, agent=name, epoch=move.epoch, reason=why))
    draft.set(phase=Training(), reports={}, verified=frozenset())
    if counts:
        for name in draft.living(move.joiners):
            draft.put(job.agents[name], failures=job.agents[name].failures + 1)
            if isinstance(job.phase, Preparing):  # otherwise all have reported
                draft.put(draft.job.agents[name], doubted=move.epoch)
                draft.do(Probe(job=job.name, agent=name, probe=move.epoch))
        left = {job.agents[name].node for name in draft.living(move.leavers.values())}
        for node in sorted(left & job.requests.keys()):
            _count_attempt(draft, node)


def revoke(draft: Draft, epochs: tuple[int, ...], why: str, move: Move | None = None) -> None:
    """Revoke `epochs`, and begin to find out who is lost and where the survivors stand."""
    extend(draft, Loss(epochs=(), move=move), epochs, why)


def extend(draft: Draft, loss: Loss, epochs: tuple[int, ...], why: str) -> None:
    """Revoke `epochs` too, in a revocation under way."""
    loss = dataclasses.replace(loss, epochs=(*loss.epochs, *epochs))
    draft.set(phase=Accusing(loss=loss))
    named = " and ".join(str(epoch) for epoch in epochs)
    draft.note(f"epoch {named} is revoked: {why}")
    for epoch in epochs:
        for name in draft.living(concerned(draft.job, loss, epoch)):
            draft.do(Revoke(job=draft.job.name, agent=name, epoch=epoch, reason=why))
    draft.arm(Wait.ACCUSE, epochs[-1])
    draft.arm(Wait.REPORT, epochs[-1])


def suspect(draft: Draft, epoch: int, why: str) -> Revoked | None:
    """Give up `epoch`, in force or planned; return the revocation that is under way now, if any."""
    job, world = draft.job, draft.job.in_force
    match job.phase:
        case Preparing(move=move):
            call_off(draft, move, why, counts=epoch != world)
            if epoch == world:
                revoke(draft, (world,), why)
        case Armed(move=move) | Switching(move=move):
            revoke(draft, (move.epoch,) if epoch != world else (move.epoch, world), why, move)
        case Starting() | Training() | Recovering():
            revoke(draft, (world,), why)
        case (Accusing() | Reporting()) as phase if epoch not in phase.loss.epochs:
            extend(draft, phase.loss, (epoch,), why)
    return revoked(draft.job)


# --- what is heard meanwhile ----------------------------------------------------------------------


def accuse(draft: Draft, event: Broken) -> None:
    """Note who accuses whom, and ask both whether they live."""
    job = draft.job
    if not has_part(job, event.worker, event.epoch):
        return
    peers = sorted(_workers(job, event.epoch).intersection(event.peers) - {event.worker})
    why = f"{event.worker} lost its link to {', '.join(event.peers) or 'nobody it could name'}"
    phase = suspect(draft, event.epoch, why)
    if phase is None:
        return
    loss = phase.loss
    new = tuple(Accusation(event.worker, peer) for peer in peers)
    new = tuple(accusation for accusation in new if accusation not in loss.accusations)
    asked = {blame.agent_of(worker) for pair in loss.accusations for worker in pair}
    ends = [blame.agent_of(worker) for pair in new for worker in pair]
    for name in draft.living(end for end in ends if end not in asked):
        draft.do(Probe(job=job.name, agent=name, probe=loss.epochs[0]))
    loss = dataclasses.replace(loss, accusations=loss.accusations + new)
    if isinstance(phase, Reporting) and blame.unexplained(new, living(draft.job, loss)):
        draft.note(f"a late accusation is heard: {why}")
        draft.arm(Wait.ACCUSE, loss.epochs[-1])
        phase = Accusing(loss=loss)
    draft.set(phase=dataclasses.replace(phase, loss=loss))


def answer(draft: Draft, event: Answered) -> None:
    """Note that an agent and its workers live."""
    phase, agent = revoked(draft.job), draft.job.agents.get(event.agent)
    if agent is not None and agent.doubted == event.probe:
        draft.put(agent, doubted=0)
    if phase is not None and event.probe == phase.loss.epochs[0]:
        answered = phase.loss.answered | {event.agent}
        loss = dataclasses.replace(phase.loss, answered=answered)
        draft.set(phase=dataclasses.replace(phase, loss=loss))


def report(draft: Draft, event: Reported) -> None:
    """Note where a worker stands. One that reports unasked has heard of a break before we did.

    The first word counts: where a worker stands in a revoked epoch cannot change any more.
    """
    if not has_part(draft.job, event.worker, event.of):
        return
    if suspect(draft, event.of, f"{event.worker} reported that it is broken") is not None:
        draft.set(reports={(event.worker, event.of): event, **draft.job.reports})


# --- what follows from it -------------------------------------------------------------------------


def settle_blame(draft: Draft, loss: Loss) -> None:
    """Say who is lost, as far as that is certain; wait no longer if it explains everything."""
    for name, reason in blame.outvoted(loss.accusations, living(draft.job, loss)).items():
        if not _may_have_its_workers_back(draft.job, name):
            draft.lose(name, reason)
    left = living(draft.job, loss)
    is_explained = not blame.unexplained(loss.accusations, left)
    if is_explained and len(left) < len(_parties(draft.job, loss)):
        _ask_survivors(draft, loss)


def _may_have_its_workers_back(job: Job, name: str) -> bool:
    """Return whether an agent that all accuse is given time to say that only its workers ended.

    They could begin again on its node then, which is of use if no standby is warm. A process whose
    links are closed may take a moment to be gone, so that its agent still answers for it.
    """
    return name in job.slots and not candidates(job, job.slots.index(name))


def hear_no_more(draft: Draft, loss: Loss) -> None:
    """Say who is lost now that the time for accusations and answers is over."""
    job, alive = draft.job, living(draft.job, loss)
    heard = loss.answered | (set(alive) - _owing(job, loss, alive))
    lost: Mapping[str, str] = {
        **blame.outvoted(loss.accusations, alive),
        **blame.silent(loss.accusations, alive, heard),
    }
    lost = lost or blame.unsound(loss.accusations, alive, job.relinked, draft.at)
    for name, reason in lost.items():
        draft.lose(name, reason)
    _ask_survivors(draft, loss)


def has_all_reports(job: Job, loss: Loss) -> bool:
    """Return whether every survivor has reported on every revoked epoch that concerns it."""
    return not _owing(job, loss, living(job, loss))


def give_up_silent(draft: Draft, loss: Loss) -> None:
    """Give up the agents that have not reported in time: nothing is known of their workers."""
    alive = living(draft.job, loss)
    owing = _owing(draft.job, loss, alive)
    for name in [name for name in alive if name in owing]:
        draft.lose(name, "its workers did not report in time")
    _ask_survivors(draft, loss)


def give_up_stuck(draft: Draft, event: Stuck) -> None:
    """Give up an agent that all others wait for, if it still has a part in what trains now."""
    job = draft.job
    is_moving = isinstance(job.phase, Training | Preparing | Armed)
    if is_moving and event.epoch == job.in_force and event.agent in job.slots:
        draft.lose(event.agent, event.reason)


def _ask_survivors(draft: Draft, loss: Loss) -> None:
    left = ", ".join(draft.job.agents[name].node for name in living(draft.job, loss))
    draft.note(f"the survivors, on {left or 'no node'}, are to report where they stand")
    draft.set(phase=Reporting(loss=loss))


# --- who ------------------------------------------------------------------------------------------


def revoked(job: Job) -> Revoked | None:
    """Return the revocation under way, or None."""
    return job.phase if isinstance(job.phase, Accusing | Reporting) else None


def has_part(job: Job, worker: str, epoch: int) -> bool:
    """Return whether a live worker speaks of an epoch that it has a part in."""
    agent = job.agent_of(worker)
    return agent is not None and agent.exit is None and agent.name in _agents(job, epoch)


def concerned(job: Job, loss: Loss, epoch: int) -> Iterable[str]:
    """Return the agents that must report on `epoch`."""
    if loss.move is not None and epoch == loss.move.epoch:
        return (*job.slots, *loss.move.joiners)
    return (*job.slots, *job.unreleased.values())


def living(job: Job, loss: Loss) -> list[str]:
    """Return the agents that have a part in this revocation and live, in the order of slots."""
    return [name for name in _parties(job, loss) if job.is_alive(name)]


def _parties(job: Job, loss: Loss) -> list[str]:
    joiners = () if loss.move is None else loss.move.joiners
    return list(dict.fromkeys([*filter(None, job.slots), *joiners, *job.unreleased.values()]))


def _owing(job: Job, loss: Loss, names: Iterable[str]) -> set[str]:
    """Return those of `names` of which a worker has yet to report."""
    found: set[str] = set()
    for epoch in loss.epochs:
        asked = set(concerned(job, loss, epoch))
        found |= {
            name
            for name in names
            if name in asked
            and any((worker, epoch) not in job.reports for worker in job.workers([name]))
        }
    return found


def _workers(job: Job, epoch: int) -> set[str]:
    """Return the workers that have a part in `epoch`, if it can still be revoked."""
    return set(job.workers(_agents(job, epoch)))


def _agents(job: Job, epoch: int) -> tuple[str, ...]:
    """Return the agents that have a part in `epoch`, if it can still be revoked."""
    move = move_of(job)
    if move is not None and epoch == move.epoch:
        return (*job.slots, *job.unreleased.values(), *move.joiners)
    return (*job.slots, *job.unreleased.values()) if epoch == job.in_force else ()


def _count_attempt(draft: Draft, node: str) -> None:
    """Count a move that failed; drop the request after too many."""
    request = draft.job.requests[node]
    tried = request._replace(attempts=request.attempts + 1)
    requests = {**draft.job.requests, node: tried}
    if tried.attempts >= ATTEMPTS:
        del requests[node]
        draft.note(f"{tried.attempts} moves of {node} failed: it stays; ask again")
    draft.set(requests=requests)
