"""From a revoked world to the next: which world holds, at which step, and who is in it.

All survivors have reported when this is decided. The step is the highest that any of them has
applied: its vote had passed there, so every other has voted good on it and still holds its
gradients. Once decided it stands, whoever is lost after that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tmover.core import blame, form, holders, links, move, standby, waiting
from tmover.core import epoch as epochs
from tmover.core.draft import Draft
from tmover.core.events import NO_STEP, SETTLED, Wait
from tmover.core.orders import Abort, Assign
from tmover.core.phase import Accusation, Loss, Move, Recovering, Reporting
from tmover.core.roster import Job


def advance(draft: Draft, loss: Loss) -> None:
    """Say which world holds, once all survivors have reported; then go on from it."""
    job, planned = draft.job, loss.move
    if not epochs.has_all_reports(job, loss):
        return
    if planned is not None and not _settle(draft, loss, planned):
        return
    settled = dataclasses.replace(loss, move=None)
    draft.set(phase=Reporting(loss=settled))
    go_on(draft, settled)


def _settle(draft: Draft, loss: Loss, planned: Move) -> bool:
    """Say whether a planned move holds; return whether the world in force then is a broken one."""
    job = draft.job
    if _is_passed(job, loss, planned):
        draft.note(f"a rank has passed into epoch {planned.epoch}: so all are in it")
        move.adopt(draft, planned)
        return True
    if job.in_force in loss.epochs:
        _keep_joiners(draft, planned)
        return True
    alive = all(map(job.is_alive, planned.joiners))
    epochs.call_off(draft, planned, "no rank has passed into it", counts=alive)
    return False


def advance_recovering(draft: Draft, phase: Recovering) -> None:
    """Train on when all have passed; start over if another is lost."""
    job = draft.job
    if job.vacant():
        epochs.revoke(draft, (job.in_force,), "a member was lost")
    elif phase.passed.issuperset(job.workers(job.slots)):
        move.complete(draft)


def overdue(draft: Draft, phase: Recovering) -> None:
    """Revoke a switch that took too long; joiners that do not hold the state are given up."""
    job = draft.job
    epochs.revoke(draft, (job.in_force,), "it took too long to switch")
    for worker in [worker for worker in phase.sources if worker not in job.verified]:
        draft.lose(blame.agent_of(worker), "it did not receive the state in time")


def go_on(draft: Draft, loss: Loss) -> None:
    """Assign the next world; wait if a slot is empty, start afresh if there is nothing to keep."""
    job, vacant = draft.job, draft.job.vacant()
    if _all_gave_up(draft) or (not vacant and form.stumbled(draft)):
        return
    step = holders.step_of(job, loss)
    after = NO_STEP if step is None or step == job.begun else step
    if form.crashed(draft, vacant, after) or form.broke_again(draft, vacant, after):
        return
    if step is None or step <= job.begun + SETTLED:
        has_begun = step is None and job.schemas
        why = "no rank is left that holds the state" if has_begun else "it had hardly begun"
        form.restart(draft, why)
        return
    if job.copies and _has_left(job, step):
        form.restart(draft, f"a rank has ended the script and cannot go back to step {step}")
        return
    draft.set(floor=None if job.copies else step)
    _take_back(draft)
    forgotten = () if job.copies else holders.forgotten(draft.job, step)
    if forgotten:
        names = ", ".join(str(slot) for slot in forgotten)
        form.restart(draft, f"the records of slot {names} are lost with the node that kept them")
        return
    _fill(draft)
    missing = draft.job.vacant()
    if missing:
        waiting.begin(draft, loss, missing)
    else:
        _assign(draft, loss, step)


def _has_left(job: Job, step: int) -> bool:
    """Return whether a rank that has ended the script would have to do steps after `step` again."""
    workers = [worker for rank, worker in enumerate(job.workers(job.slots)) if rank in job.finished]
    return any((report.step or 0) > step for report in job.standings(workers))


# --- which world ----------------------------------------------------------------------------------


def _is_passed(job: Job, loss: Loss, planned: Move) -> bool:
    found = job.standings(job.workers(epochs.living(job, loss)))
    return any(report.epoch == planned.epoch for report in found)


def _keep_joiners(draft: Draft, planned: Move) -> None:
    """Seat the joiners whose leavers are lost, in the world before the move; release the others."""
    job = draft.job
    slots = list(job.slots)
    for slot, leaver in planned.leavers.items():
        joiner = planned.slots[slot]
        if job.is_alive(joiner) and not job.is_alive(leaver):
            slots[slot] = joiner
            draft.put(job.agents[joiner], slot=slot, sandbox=False)
        elif joiner in job.agents:
            why = "the world before the move was broken"
            draft.do(Abort(job=job.name, agent=joiner, epoch=planned.epoch, reason=why))
            draft.forget(joiner)
    draft.set(slots=tuple(slots))


def _all_gave_up(draft: Draft) -> bool:
    """End the job if the scripts of all slots ended by their own error: it would happen again.

    The job's exit code is that of the first slot's script.
    """
    agents = [draft.job.agents.get(name) for name in draft.job.slots]
    exits = [agent.exit for agent in agents if agent is not None and agent.exit is not None]
    if len(exits) < draft.job.nnodes or not all(end.is_error for end in exits):
        return False
    reasons = dict.fromkeys(end.reason for end in exits)
    draft.end(exits[0].job_code, f"the script failed on all nodes: {'; '.join(reasons)}")
    return True


# --- who is in it ---------------------------------------------------------------------------------


def _take_back(draft: Draft) -> None:
    """Give vacant slots back to their leavers, where those still hold their state."""
    for slot in draft.job.vacant():
        leaver = draft.job.unreleased.get(slot, "")
        if draft.job.is_alive(leaver):
            agent = draft.job.agents[leaver]
            kept = {s: name for s, name in draft.job.unreleased.items() if s != slot}
            draft.set(unreleased=kept)
            draft.note(f"{agent.node} takes its slot {slot} back")
            draft.seat(slot, leaver)


def _fill(draft: Draft) -> None:
    """Give vacant slots to warm standbys, as far as there are any."""
    for slot in draft.job.vacant():
        draft.seat(slot, "")
        fit = standby.candidates(draft.job, slot)
        if fit:
            draft.note(f"{fit[0].node} takes slot {slot}")
            draft.put(fit[0], slot=slot, sandbox=False)
            draft.seat(slot, fit[0].name)


def _assign(draft: Draft, loss: Loss, step: int) -> None:
    accused = blame.unexplained(loss.accusations, draft.job.slots)
    broken = [one for one in accused if _are_there_still(draft.job, one)]
    relink = _relink(draft.job, broken)
    find = holders.copied if draft.job.copies else holders.sources
    sources = find(draft.job, step)
    helpers = holders.helpers(draft.job, sources, step)
    epoch = draft.next_epoch()
    plan = draft.job.world(epoch, draft.job.slots)
    pairs = {blame.pair_of(accusation) for accusation in broken}
    draft.set(
        plan=plan,
        verified=draft.job.verified - sources.keys(),
        phase=Recovering(step=step, sources=sources, helpers=helpers, relink=relink),
        relinked={**draft.job.relinked, **dict.fromkeys(pairs, draft.at)},
        opened=links.opened(draft.job, plan, links.newcomers(draft.job), relink),
    )
    draft.note(f"epoch {epoch} begins after step {step}")
    senders = {blame.agent_of(worker) for worker in sources.values()}
    helping = [a for a in draft.job.unreleased.values() if a in senders]
    for name in (*draft.job.slots, *helping):
        draft.do(
            Assign(
                job=draft.job.name,
                agent=name,
                plan=plan,
                step=step,
                sources=sources,
                helpers=helpers,
                relink=relink,
                back=draft.job.copies > 0,
            )
        )
    draft.arm(Wait.SWITCH, epoch)


def _are_there_still(job: Job, accusation: Accusation) -> bool:
    """Return whether the processes that a link broke between are those that hold the ranks now.

    Workers that were started again on their node have their names again, and none of its links.
    """
    now = {worker: end for name in job.slots for worker, end in _endpoints(job, name)}
    then = {} if job.plan is None else {m.worker: m.endpoint for m in job.plan.members}
    return all(then.get(worker) in (None, now.get(worker)) for worker in accusation)


def _endpoints(job: Job, name: str) -> Iterable[tuple[str, str]]:
    return zip(job.workers([name]), job.agents[name].endpoints, strict=False)


def _relink(job: Job, broken: Iterable[Accusation]) -> tuple[tuple[str, str], ...]:
    """Return whose links are opened afresh: those that broke, and those that only one end has."""
    found = list(dict.fromkeys((a.accuser, a.accused) for a in broken))
    said = set(map(frozenset, found))
    return (*found, *(pair for pair in links.one_sided(job) if frozenset(pair) not in said))
