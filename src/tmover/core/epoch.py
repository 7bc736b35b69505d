"""How an epoch is given up: aborted while nobody is armed for it, revoked afterwards.

An aborted epoch is over at once. A revoked one is over when every survivor has reported where it
stands, and not before: a vote or a barrier of it may have passed on some ranks and not on others,
and only the reports tell. Blame is settled meanwhile, so that it is known who the survivors are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from tmover.core import blame
from tmover.core.draft import Draft
from tmover.core.events import NO_STEP, Abort, Answered, Broken, Probe, Reported, Revoke, Wait
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
from tmover.core.roster import Job, Request
from tmover.core.standby import move_of

ATTEMPTS = 3
"""Moves tried for one request before it is dropped."""


# --- giving up ------------------------------------------------------------------------------------


def call_off(draft: Draft, move: Move, why: str, *, counts: bool = False) -> None:
    """Abort a planned move that nobody can have passed: training goes on as before."""
    job = draft.job
    draft.note(f"the move to epoch {move.epoch} is called off: {why}")
    for name in draft.living([*job.slots, *move.joiners]):
        draft.do(Abort(job=job.name, agent=name, epoch=move.epoch, reason=why))
    draft.set(phase=Training(), reports=_only(job.reports, {job.in_force}), verified=frozenset())
    if counts:
        for name in draft.living(move.joiners):
            draft.put(job.agents[name], failures=job.agents[name].failures + 1)
        for name in draft.living(move.leavers.values()):
            _count_attempt(draft, job.agents[name].node)


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


def suspect(draft: Draft, epoch: int, why: str) -> Loss | None:
    """Give up `epoch` if it is one that can be; return its revocation if that is under way now."""
    job, world = draft.job, draft.job.in_force
    match job.phase:
        case Preparing(move=move) if epoch in (world, move.epoch):
            call_off(draft, move, why, counts=epoch == move.epoch)
            if epoch == world:
                revoke(draft, (world,), why)
        case Armed(move=move) | Switching(move=move) if epoch == move.epoch:
            revoke(draft, (epoch,), why, move)
        case Armed(move=move) | Switching(move=move) if epoch == world:
            revoke(draft, (move.epoch, world), why, move)
        case Starting() | Training() | Recovering() if epoch == world:
            revoke(draft, (world,), why)
        case (Accusing() | Reporting()) as phase if epoch == world:
            if world not in phase.loss.epochs:
                extend(draft, phase.loss, (world,), why)
    loss = loss_of(draft.job)
    return loss if loss is not None and epoch in loss.epochs else None


# --- what is heard meanwhile ----------------------------------------------------------------------


def accuse(draft: Draft, event: Broken) -> None:
    """Note who accuses whom, and ask both whether they live."""
    job = draft.job
    if not _belongs(job, event.worker, event.epoch):
        return
    peers = sorted(_workers(job, event.epoch).intersection(event.peers) - {event.worker})
    why = f"{event.worker} lost its link to {', '.join(event.peers) or 'nobody it could name'}"
    loss = suspect(draft, event.epoch, why)
    if loss is None:
        return
    new = tuple(Accusation(event.worker, peer) for peer in peers)
    new = tuple(accusation for accusation in new if accusation not in loss.accusations)
    asked = {blame.agent_of(worker) for pair in loss.accusations for worker in pair}
    ends = [blame.agent_of(worker) for pair in new for worker in pair]
    for name in draft.living(end for end in ends if end not in asked):
        draft.do(Probe(job=job.name, agent=name, probe=loss.epochs[0]))
    loss = dataclasses.replace(loss, accusations=loss.accusations + new)
    is_news = bool(blame.unexplained(new, living(draft.job, loss)))
    if isinstance(draft.job.phase, Reporting) and is_news:
        draft.note(f"late accusations are heard: {why}")
        draft.arm(Wait.ACCUSE, loss.epochs[-1])
        draft.set(phase=Accusing(loss=loss))
    else:
        _keep(draft, loss)


def answer(draft: Draft, event: Answered) -> None:
    """Note that an agent and its workers live."""
    loss = loss_of(draft.job)
    if loss is None or event.agent not in draft.job.agents or event.probe != loss.epochs[0]:
        return
    _keep(draft, dataclasses.replace(loss, answered=loss.answered | {event.agent}))


def report(draft: Draft, event: Reported) -> None:
    """Note where a worker stands. One that reports unasked has heard of a break before we did."""
    job, key = draft.job, (event.worker, event.of)
    if not _belongs(job, event.worker, event.of):
        return
    if suspect(draft, event.of, f"{event.worker} reported that it is broken") is None:
        return
    known = job.reports.get(key)
    if known is None or _age(known) <= _age(event):
        draft.set(reports={**job.reports, key: event})


# --- what follows from it -------------------------------------------------------------------------


def settle_blame(draft: Draft, loss: Loss, *, time_is_up: bool = False) -> None:
    """Say who is lost, as soon as that is certain or the time for accusations is over."""
    job = draft.job
    alive = living(job, loss)
    lost = blame.outvoted(loss.accusations, alive)
    if not lost and time_is_up:
        heard = loss.answered | {name for name in alive if not _owing(job, loss, name)}
        lost = blame.silent(loss.accusations, alive, heard)
    if not lost and time_is_up:
        lost = blame.unsound(loss.accusations, alive, job.relinked, draft.at)
    _lose(draft, lost)
    left = living(draft.job, loss)
    is_explained = len(left) < len(_parties(job, loss)) and not blame.unexplained(
        loss.accusations, left
    )
    if time_is_up or is_explained:
        draft.note(f"{len(left)} survivors are to report where they stand")
        draft.set(phase=Reporting(loss=loss))


def has_all_reports(job: Job, loss: Loss) -> bool:
    """Return whether every survivor has reported on every revoked epoch that concerns it."""
    return not any(_owing(job, loss, name) for name in living(job, loss))


def give_up_silent(draft: Draft, loss: Loss) -> None:
    """Give up the agents that have not reported in time: nothing is known of their workers."""
    owing = [name for name in living(draft.job, loss) if _owing(draft.job, loss, name)]
    _lose(draft, dict.fromkeys(owing, "its workers did not report in time"))
    draft.set(phase=Reporting(loss=loss))


def _lose(draft: Draft, lost: Mapping[str, str]) -> None:
    for name, reason in lost.items():
        agent = draft.job.agents.get(name)
        if agent is not None:
            draft.lose(agent.node, reason)


def _keep(draft: Draft, loss: Loss) -> None:
    """Put what was heard into the phase."""
    phase = draft.job.phase
    if isinstance(phase, Accusing | Reporting):
        draft.set(phase=dataclasses.replace(phase, loss=loss))


# --- who ------------------------------------------------------------------------------------------


def loss_of(job: Job) -> Loss | None:
    """Return the revocation under way, or None."""
    return job.phase.loss if isinstance(job.phase, Accusing | Reporting) else None


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


def _owing(job: Job, loss: Loss, name: str) -> bool:
    """Return whether a worker of the agent has yet to report."""
    return any(
        (worker, epoch) not in job.reports
        for epoch in loss.epochs
        if name in concerned(job, loss, epoch)
        for worker in job.workers([name])
    )


def _workers(job: Job, epoch: int) -> set[str]:
    """Return the workers that have a part in `epoch`, if it can still be revoked."""
    move = move_of(job)
    agents = [*job.slots, *job.unreleased.values()]
    if move is not None and epoch == move.epoch:
        return set(job.workers([*agents, *move.joiners]))
    return set(job.workers(agents)) if epoch == job.in_force else set()


def _belongs(job: Job, worker: str, epoch: int) -> bool:
    """Return whether a live worker speaks of an epoch that it has a part in."""
    agent = job.agent_of(worker)
    return agent is not None and epoch > agent.since and worker in _workers(job, epoch)


def _only(
    reports: Mapping[tuple[str, int], Reported], epochs: set[int]
) -> dict[tuple[str, int], Reported]:
    return {key: report for key, report in reports.items() if key[1] in epochs}


def _age(report: Reported) -> tuple[int, int]:
    return report.epoch, NO_STEP - 1 if report.step is None else report.step


def _count_attempt(draft: Draft, node: str) -> None:
    request = draft.job.requests.get(node)
    if request is None:
        return
    tried = Request(request.reason, request.attempts + 1)
    requests = {**draft.job.requests, node: tried}
    if tried.attempts >= ATTEMPTS:
        del requests[node]
        draft.note(f"{tried.attempts} moves of {node} failed: it stays; ask again")
    draft.set(requests=requests)
