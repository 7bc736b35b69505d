"""Decide what happens to a job. `decide` is the only way to change a `Job`.

Each event is first written down as a fact, whatever the phase; what to do about it is then drawn
from the state, phase by phase, until nothing more follows. So a fact is never lost because it came
at a bad moment, and one that comes twice changes nothing. `phase` lists the phases, `form`, `move`
and `recover` decide in them, `epoch` and `blame` say how a world is given up.

The controller journals each event before it feeds it here, and carries out the actions in order.
After a restart it replays the journal, carries out the last event's actions again, then those of
`wake`; an agent that connects anew is told what `resume` returns.
"""

from __future__ import annotations

from tmover.core import epoch as epochs
from tmover.core import form, move, pool, recover, standby, straggler, timeline, waiting
from tmover.core.again import resume, wake
from tmover.core.draft import Draft
from tmover.core.events import (
    CANCELLED,
    Answered,
    AnyEvent,
    Broken,
    CancelRequested,
    DeadlinePassed,
    Entered,
    Exited,
    Finished,
    Joined,
    Launched,
    LeaseExpired,
    Left,
    Lent,
    Looping,
    MoveRequested,
    NodeLost,
    NodeReady,
    OfMoves,
    Outside,
    Passed,
    Placing,
    Prepared,
    PrepareFailed,
    Reported,
    Sharing,
    StandbysGone,
    Stored,
    Straggling,
    Stuck,
    Submitted,
    Verified,
    Wait,
    Warm,
)
from tmover.core.orders import Action, Stop
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
from tmover.core.roster import Agent, Exit, Job, Ordered, is_own_error

__all__ = ["CANCELLED", "Job", "decide", "resume", "wake"]


def decide(job: Job, event: AnyEvent) -> tuple[Job, list[Action]]:
    """Return the job after `event`, and what to do about it.

    A stale, repeated or misplaced event changes nothing: messages arrive late, and twice.
    """
    draft = Draft(job, event.at)
    if isinstance(event, Joined):
        _hear_of_agent(draft, event)
    elif isinstance(job.phase, Ended):
        return job, []
    elif isinstance(event, DeadlinePassed):
        _hear_clock(draft, event)
    elif isinstance(event, Left):
        _hear_farewell(draft, event)
    elif isinstance(event, Launched | Looping | Sharing | Warm | Exited):
        _hear_of_launch(draft, event)
    elif isinstance(event, Outside):
        _hear_outside(draft, event)
    elif isinstance(event, Stored):
        waiting.stored(draft, event)
    else:
        _hear_worker(draft, event)
    if draft.job is not job:  # from what was known already, all has been drawn that follows
        follow(draft)
    timeline.keep(draft, job, event)
    return draft.job, draft.actions


# --- facts ----------------------------------------------------------------------------------------


def _hear_of_agent(draft: Draft, event: Joined) -> None:
    job = draft.job
    if job.has_met(event.agent):
        draft.do(*resume(job, event.agent))
    elif isinstance(job.phase, Ended):
        code, reason = job.phase.code, f"the job has ended: {job.phase.reason}"
        draft.do(Stop(job=job.name, agent=event.agent, code=code, reason=reason))
    elif not isinstance(job.phase, New):
        form.join(draft, event)


def _hear_of_launch(draft: Draft, event: Launched | Looping | Sharing | Warm | Exited) -> None:
    job = draft.job
    if isinstance(event, Launched | Exited):
        agent = job.agents.get(event.agent)
    else:
        agent = job.agent_of(event.worker)
    if agent is None or agent.launch != event.launch or agent.exit is not None:
        return
    match event:
        case Launched(endpoints=endpoints) if len(endpoints) == job.nproc and not agent.endpoints:
            draft.put(agent, endpoints=endpoints)
        case Looping() if not agent.sandbox:
            draft.put(agent, schemas={**agent.schemas, event.worker: event.schema})
            placing = max(job.placing, event.placing, key=list(Placing).index)
            draft.set(placing=placing, begun=event.step)
        case Sharing(keepers=keepers, copies=copies) if not agent.sandbox:
            draft.set(keepers=keepers, copies=0 if keepers else copies)
        case Warm(cast=cast) if agent.sandbox and cast == agent.cast:
            standby.hear_warm(draft, agent, event)
        case Exited(code=code, reason=reason):
            end = _exit(job, agent, code, reason)
            standby.hear_exit(draft, agent, end)
            draft.forget(agent.name)


def _hear_farewell(draft: Draft, event: Left) -> None:
    """Note that an agent has ended. A slot is its own until the job has decided about that."""
    agent = draft.job.agents.get(event.agent)
    if agent is not None and not agent.has_left:
        end = agent.exit or _exit(draft.job, agent, event.code, event.reason)
        draft.put(agent, exit=end, has_left=True)
        draft.forget(agent.name)


def _exit(job: Job, agent: Agent, code: int, reason: str) -> Exit:
    was_carried_along = not agent.is_ready and epochs.revoked(job) is not None
    return Exit(code, reason, is_own_error(code) and not was_carried_along)


def _hear_outside(draft: Draft, event: Outside) -> None:
    match event:
        case Submitted():
            form.submit(draft, event)
        case MoveRequested():
            move.request(draft, event)
        case NodeReady(node=node):
            move.welcome_back(draft, node)
        case CancelRequested(reason=reason, code=code):
            draft.end(code, reason)
        case NodeLost() | LeaseExpired():
            _lose(draft, event)
        case Lent(agent=name, to=to):
            pool.lend(draft, name, to)
        case StandbysGone(epoch=epoch):
            _await_no_order(draft, epoch)
        case Stuck():
            epochs.give_up_stuck(draft, event)
        case Straggling():
            straggler.hear(draft, event)


def _lose(draft: Draft, event: NodeLost | LeaseExpired) -> None:
    if isinstance(event, LeaseExpired):
        draft.lose(event.agent, "its agent was not heard of for the lease")
        return
    for name in [agent.name for agent in draft.job.agents.values() if agent.node == event.node]:
        draft.lose(name, event.reason)


def _hear_worker(draft: Draft, event: OfMoves) -> None:
    match event:
        case Prepared():
            move.prepared(draft, event)
        case PrepareFailed():
            move.prepare_failed(draft, event)
        case Entered() | Verified() | Passed():
            move.progress(draft, event)
        case Broken():
            epochs.accuse(draft, event)
        case Reported():
            epochs.report(draft, event)
        case Answered():
            epochs.answer(draft, event)
        case Finished(worker=worker) if not isinstance(draft.job.phase, Forming):
            rank, move_on = draft.job.rank_of(worker), standby.move_of(draft.job)
            if rank is None and move_on is not None:  # it has passed, and says so later
                rank = move_on.plan.rank_of(worker)
            if rank is not None:
                draft.set(finished=draft.job.finished | {rank})


def _hear_clock(draft: Draft, event: DeadlinePassed) -> None:
    """Carry out what was declared for the end of a wait, if it is still the one waited for."""
    job, wait, epoch = draft.job, event.wait, event.epoch
    match job.phase:
        case Forming(since=since) if (wait, epoch) == (Wait.FORM, since):
            form.overdue(draft)
        case Starting() if (wait, epoch) == (Wait.FORM, job.in_force):
            form.overdue(draft)
        case (Preparing() | Armed()) as phase if (wait, epoch) == (Wait.PREPARE, phase.move.epoch):
            move.overdue(draft, phase)
        case Switching() as phase if (wait, epoch) == (Wait.SWITCH, phase.move.epoch):
            move.overdue(draft, phase)
        case Recovering() as phase if (wait, epoch) == (Wait.SWITCH, job.in_force):
            recover.overdue(draft, phase)
        case Accusing(loss=loss) if (wait, epoch) == (Wait.ACCUSE, loss.epochs[-1]):
            epochs.hear_no_more(draft, loss)
        case (Accusing() | Reporting()) as phase if (wait, epoch) == _report_due(phase):
            epochs.give_up_silent(draft, phase.loss)
    if wait is Wait.STANDBY:
        _await_no_order(draft, epoch)
    elif wait in (Wait.NODE, Wait.STORE):
        waiting.hear_clock(draft, wait, epoch)


def _await_no_order(draft: Draft, epoch: int) -> None:
    """Wait no longer for standbys ordered with `epoch`: what is still needed is ordered anew."""
    if epoch == draft.job.ordered.epoch:
        draft.set(ordered=Ordered(0, epoch))


def _report_due(phase: Accusing | Reporting) -> tuple[Wait, int]:
    return Wait.REPORT, phase.loss.epochs[-1]


# --- what follows from them -----------------------------------------------------------------------


def follow(draft: Draft) -> None:
    """Draw decisions from the state until none is left to draw."""
    before = None
    while draft.job is not before and not isinstance(draft.job.phase, New | Ended):
        before = draft.job
        if 0 < len(before.finished) == before.nnodes * before.nproc:
            draft.end(0, "done")
            return
        _advance(draft)
        if not isinstance(draft.job.phase, Ended):
            standby.tend(draft)


def _advance(draft: Draft) -> None:
    match draft.job.phase:
        case Forming() as phase:
            form.advance(draft, phase)
        case Starting() | Training() if draft.job.vacant():
            epochs.revoke(draft, (draft.job.in_force,), "a member was lost")
        case Starting():
            form.finish(draft)
        case Training():
            move.begin(draft)
        case Preparing(move=planned, prepared=ready):
            move.advance_preparing(draft, planned, ready)
        case Armed(move=planned):
            move.advance_armed(draft, planned)
        case Switching() as phase:
            move.advance_switching(draft, phase)
        case _:
            _advance_failure(draft)


def _advance_failure(draft: Draft) -> None:
    job = draft.job
    match job.phase:
        case Accusing(loss=loss) | Reporting(loss=loss) if (
            job.vacant() and job.in_force not in loss.epochs
        ):
            epochs.extend(draft, loss, (job.in_force,), "a member was lost")
        case Accusing(loss=loss):
            epochs.settle_blame(draft, loss)
        case Reporting(loss=loss):
            recover.advance(draft, loss)
        case Waiting(loss=loss):
            recover.go_on(draft, loss)
        case Storing() as phase:
            waiting.advance(draft, phase)
        case Recovering() as phase:
            recover.advance_recovering(draft, phase)
