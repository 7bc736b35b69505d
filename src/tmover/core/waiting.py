"""A slot that nobody can take yet: the next path for it, and what happens if none leads anywhere.

A warm standby comes first. Without one, workers that died alone are started again where they were:
their agent lives, so the node does. For what is still missing a node is ordered. The survivors
stand still meanwhile and hold all they had. After the time that is set they write a checkpoint of
it, and the job ends with the code that has a scheduler requeue it.
"""

from __future__ import annotations

from tmover.core import blame, holders, standby
from tmover.core.draft import UNFIT, Draft
from tmover.core.events import REQUEUE, Plan, Stored, Wait
from tmover.core.orders import AnyOrder, Store
from tmover.core.phase import Loss, Storing, Waiting
from tmover.core.roster import Agent, Job


def begin(draft: Draft, loss: Loss, missing: tuple[int, ...]) -> None:
    """Wait for whoever is to take these slots, and see that somebody comes."""
    phase = draft.job.phase
    since = phase.since if isinstance(phase, Waiting) else draft.at
    draft.set(phase=Waiting(loss=loss, since=since))
    if not isinstance(phase, Waiting):
        draft.note(f"no standby is warm for slot {_listed(missing)}: training waits for one")
        draft.arm(Wait.NODE, loss.epochs[-1])
    coming = [*standby.spare(draft.job), *returning(draft.job)]
    if draft.job.unfit >= UNFIT and not coming:
        draft.end(1, f"{UNFIT} standbys in a row could not rehearse the script, and none is left")
        return
    draft.order(len(missing) - len(coming))


def returning(job: Job) -> list[Agent]:
    """Return the agents without a place whose workers ended, and are started again there."""
    placed = standby.placed(job)
    return [
        agent
        for agent in job.agents.values()
        if agent.exit is not None
        and not agent.has_left
        and agent.failures < standby.FAILURES
        and agent.name not in placed
        and agent.node not in job.requests
    ]


def hear_clock(draft: Draft, wait: Wait, epoch: int) -> None:
    """Wait no longer for a node, or for the checkpoint, if it is still this that is waited for."""
    match draft.job.phase:
        case Waiting(loss=loss) if (wait, epoch) == (Wait.NODE, loss.epochs[-1]):
            _give_up(draft, loss)
        case Storing() as phase if (wait, epoch) == (Wait.STORE, phase.epoch):
            _end(draft, phase, "no checkpoint was written then: it took too long")


def _give_up(draft: Draft, loss: Loss) -> None:
    """Have the survivors store what they hold, now that no node has come in time."""
    job = draft.job
    why = f"no node came in time for slot {_listed(job.vacant())}"
    step = holders.step_of(job, loss)
    if step is None:  # those that held it are gone meanwhile
        draft.end(REQUEUE, f"{why}, and nobody is left that holds the state")
        return
    parts = holders.writers(job, step)
    epoch = draft.next_epoch()
    back = job.copies > 0
    draft.set(phase=Storing(epoch=epoch, step=step, parts=parts, back=back, why=why))
    draft.note(f"{why}: the survivors store what they hold after step {step}, and the job ends")
    for agent in dict.fromkeys(map(blame.agent_of, parts)):
        draft.do(*orders(draft.job, agent))
    draft.arm(Wait.STORE, epoch)


def orders(job: Job, agent: str) -> list[AnyOrder]:
    """Return what an agent is to store."""
    phase = job.phase
    if not isinstance(phase, Storing) or agent not in map(blame.agent_of, phase.parts):
        return []
    told = Store(
        job=job.name,
        agent=agent,
        plan=Plan(epoch=phase.epoch, members=()),
        step=phase.step,
        sources={},
        parts=dict(phase.parts),
        back=phase.back,
    )
    return [told]


def stored(draft: Draft, event: Stored) -> None:
    """End the job once its checkpoint is whole, or cannot become so."""
    phase = draft.job.phase
    if not isinstance(phase, Storing) or event.epoch != phase.epoch:
        return
    if event.worker in phase.parts and event.reason:
        _end(draft, phase, f"no checkpoint was written then: {event.reason}")
    elif 0 in phase.parts.get(event.worker, ()):
        done = f"a checkpoint of step {phase.step} is written, and a job that resumes goes on"
        _end(draft, phase, done)


def advance(draft: Draft, phase: Storing) -> None:
    """Give the checkpoint up if somebody is lost who was to write a part of it."""
    lost = [w for w in phase.parts if not draft.job.is_alive(blame.agent_of(w))]
    if lost:
        _end(draft, phase, f"no checkpoint was written then: {lost[0]} was lost")


def tried(job: Job) -> tuple[str, ...]:
    """Return, in words, who may take the slots that are waited for, or why not."""
    if not isinstance(job.phase, Waiting):
        return ()
    said = [_trial(job, agent, job.vacant()) for agent in standby.spare(job)]
    if job.ordered.nodes:
        said.append(f"{job.ordered.nodes} ordered of the scheduler")
    return tuple(said)


def _trial(job: Job, agent: Agent, vacant: tuple[int, ...]) -> str:
    if agent.node in job.requests:
        return f"{agent.node} is to be left"
    if not agent.is_ready:
        return f"{agent.node} is {agent.state} for slot {agent.slot}"
    names = dict.fromkeys(name for slot in vacant for name in standby.misfits(job, agent, slot))
    return f"{agent.node} does not fit: tracked {', '.join(names)} differ"


def _end(draft: Draft, phase: Storing, how: str) -> None:
    draft.end(REQUEUE, f"{phase.why}; {how}")


def _listed(slots: tuple[int, ...]) -> str:
    return ", ".join(map(str, slots))
