"""After a restart, or a new connection: what is asked of an agent, and which deadlines run."""

from __future__ import annotations

from tmover.core import epoch as epochs
from tmover.core import form, standby, waiting
from tmover.core.draft import welcome
from tmover.core.events import Plan, Wait
from tmover.core.orders import (
    Abort,
    AnyEffect,
    AnyOrder,
    Arm,
    ArmDeadline,
    Assign,
    Done,
    Lend,
    Prepare,
    Probe,
    Revoke,
    Start,
    Stop,
)
from tmover.core.phase import (
    Accusing,
    Armed,
    Ended,
    Forming,
    Preparing,
    Recovering,
    Reporting,
    Starting,
    Storing,
    Switching,
    Training,
    Waiting,
)
from tmover.core.roster import Job, lent_name

_NOWHERE = Plan(epoch=0, members=())


def resume(job: Job, agent: str) -> list[AnyOrder]:
    """Return the orders that bring an agent which may have missed some to where it should be."""
    if agent in job.gone:
        code, reason, to, afresh, _ = job.gone[agent]
        if to:
            name = lent_name(agent)
            return [Lend(job=job.name, agent=agent, to=to, name=name, afresh=afresh)]
        return [Stop(job=job.name, agent=agent, code=code, reason=reason)]
    known = job.agents.get(agent)
    if known is None:
        return []
    if isinstance(job.phase, Ended):
        return [Stop(job=job.name, agent=agent, code=job.phase.code, reason=job.phase.reason)]
    doubts = [Probe(job=job.name, agent=agent, probe=known.doubted)] if known.doubted else []
    return [welcome(job, known), *_aborts(job, agent), *doubts, *_standing_orders(job, agent)]


def wake(job: Job) -> list[AnyEffect]:
    """Return the deadlines that run in this state, for a controller that was started again."""
    job_due = _due(job)
    if job.ordered.nodes and not isinstance(job.phase, Ended):
        job_due.append((Wait.STANDBY, job.ordered.epoch))
    timers: list[AnyEffect] = [
        ArmDeadline(job=job.name, wait=wait, epoch=epoch) for wait, epoch in job_due
    ]
    if isinstance(job.phase, Waiting):  # a controller that starts again grants no more time
        last, since = job.phase.loss.epochs[-1], job.phase.since
        timers.append(ArmDeadline(job=job.name, wait=Wait.NODE, epoch=last, since=since))
    return timers


def _due(job: Job) -> list[tuple[Wait, int]]:
    """Return the deadlines of the phase, and the epochs they carry, that run from now."""
    due: list[tuple[Wait, int]] = []
    match job.phase:
        case Forming(since=since) if not form.is_pending(job):
            due = [(Wait.FORM, since)]
        case Starting():
            due = [(Wait.FORM, job.in_force)]
        case Preparing(move=m) | Armed(move=m):
            due = [(Wait.PREPARE, m.epoch)]
        case Switching(move=m):
            due = [(Wait.SWITCH, m.epoch)]
        case Recovering():
            due = [(Wait.SWITCH, job.in_force)]
        case Accusing(loss=loss):
            due = [(Wait.ACCUSE, loss.epochs[-1]), (Wait.REPORT, loss.epochs[-1])]
        case Reporting(loss=loss):
            due = [(Wait.REPORT, loss.epochs[-1])]
        case Storing(epoch=epoch):
            due = [(Wait.STORE, epoch)]
    return due


def _aborts(job: Job, agent: str) -> list[AnyOrder]:
    """Return the end of every planned move beyond the world in force that came to nothing."""
    planned = standby.move_of(job)
    burnt = range(job.in_force + 1, job.epoch + 1 if planned is None else planned.epoch)
    return [
        Abort(job=job.name, agent=agent, epoch=epoch, reason="it came to nothing")
        for epoch in burnt
        if not isinstance(job.phase, Forming)
    ]


def _standing_orders(job: Job, agent: str) -> list[AnyOrder]:
    """Return what this phase asks of the agent."""
    if not standby.has_place(job, agent):
        return []
    orders: list[AnyOrder] = []
    name, plan = job.name, job.plan or _NOWHERE
    match job.phase:
        case Starting():
            orders = [Start(job=name, agent=agent, plan=plan)]
        case Training():
            orders = [Done(job=name, agent=agent, epoch=job.in_force)]
        case Preparing(move=m) | Armed(move=m) | Switching(move=m):
            orders = [
                Prepare(
                    job=name,
                    agent=agent,
                    plan=m.plan,
                    sources=dict(m.sources),
                    helpers=dict(m.helpers),
                )
            ]
            if not isinstance(job.phase, Preparing):
                orders.append(Arm(job=name, agent=agent, epoch=m.epoch))
        case Storing():
            orders = waiting.orders(job, agent)
        case Accusing(loss=loss) | Reporting(loss=loss) | Waiting(loss=loss):
            why = "it is to be reported on"
            orders = [
                Revoke(job=name, agent=agent, epoch=epoch, reason=why)
                for epoch in loss.epochs
                if agent in epochs.concerned(job, loss, epoch)
            ]
            if any(agent == w.rpartition("/")[0] for pair in loss.accusations for w in pair):
                orders.append(Probe(job=name, agent=agent, probe=loss.epochs[0]))
        case Recovering(step=step, sources=sources, helpers=helpers, relink=relink) if (
            agent in job.slots
        ):
            orders = [
                Assign(
                    job=name,
                    agent=agent,
                    plan=plan,
                    step=step,
                    sources=dict(sources),
                    helpers=dict(helpers),
                    relink=relink,
                    back=job.copies > 0,
                )
            ]
    return orders
