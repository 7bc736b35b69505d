"""How a job gets its first world: agents take slots, launch their workers, and start together.

A start that fails before the first vote has passed is made again with fresh workers: there is
nothing to lose yet, and half-built models are of no use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from tmover.core import roles, standby
from tmover.core.draft import RELEASED, Draft
from tmover.core.events import NO_STEP, Joined, Placing, Submitted, Wait
from tmover.core.orders import Start
from tmover.core.phase import Forming, New, Starting, Training
from tmover.core.roster import Agent, Breaks, Crashes, Farewell, Job

STUMBLES = 3
"""Attempts in a row at a world that fail although nobody was lost: then the job fails."""
BREAKS = 3
"""Times in a row that a whole world breaks at one step with nobody lost: then the job fails."""
JOINERS = 5
"""Standbys in a row that are lost while they take a slot over: then the job fails."""
ERRORS = 2
"""Errors of the script itself on one slot at one step: then the job fails."""
LOSSES = 3
"""Losses of one slot at one step, for any reason: then it is the step, not the nodes.

Before the first step it takes twice as many as a node is given: two nodes have failed at it then.
"""


def submit(draft: Draft, event: Submitted) -> None:
    """Begin to fill the slots."""
    if not isinstance(draft.job.phase, New):
        return
    draft.set(
        nnodes=event.nnodes,
        nproc=event.nproc,
        owner=event.owner,
        reserve=event.standby,
        allocated=event.allocated,
        pool=event.pool,
        slots=("",) * event.nnodes,
        phase=Forming(since=0),
    )
    if not event.allocated:  # an allocation may be pending for days: its first agent starts it
        draft.arm(Wait.FORM, 0)
    draft.note(f"waiting for {event.nnodes} nodes")


def join(draft: Draft, event: Joined) -> None:
    """Give a new agent a slot, or make it a standby.

    A node carries one agent of a job: two would be lost together.
    """
    if not draft.job.nproc:
        draft.set(nproc=event.nproc)
    job = draft.job
    if event.nproc != job.nproc:
        reason = f"{event.node} came with {event.nproc} workers, the job has {job.nproc} per node"
        _turn_away(draft, event, reason)
        if event.standby:
            draft.count_unfit()
        return
    if event.standby and any(agent.node == event.node for agent in job.agents.values()):
        _turn_away(draft, event, f"{event.node} carries a part of the job already: no standby")
        return
    slot = _free_slot(job, event)
    if is_pending(job):
        draft.arm(Wait.FORM, 0)
    draft.greet(
        Agent(
            name=event.agent,
            node=event.node,
            address=event.address,
            launch=1,
            lent_by=event.lent_by,
            slot=standby.first_stop(job) if slot is None else slot,
            sandbox=slot is None,
        )
    )
    draft.set(left={node: at for node, at in job.left.items() if node != event.node})
    if slot is not None:
        draft.seat(slot, event.agent)
    _count_order(draft, event)


def _turn_away(draft: Draft, event: Joined, reason: str) -> None:
    draft.note(reason)
    draft.dismiss(event.agent, Farewell(2, reason))
    _count_order(draft, event)


def _count_order(draft: Draft, event: Joined) -> None:
    """Note that one of the standbys that were ordered has come."""
    ordered = draft.job.ordered
    if event.standby and ordered.nodes:
        draft.set(ordered=ordered._replace(nodes=ordered.nodes - 1))


def is_pending(job: Job) -> bool:
    """Return whether the job's allocation has brought no agent yet: it may wait in a queue."""
    return job.allocated and job.phase == Forming(since=0) and not (job.agents or job.gone)


def advance(draft: Draft, phase: Forming) -> None:
    """Fill what was vacated; start when every slot's workers are up."""
    held = {slot for slot, name in enumerate(draft.job.slots) if name}
    for slot in sorted(held):
        agent = draft.job.agents.get(draft.job.slots[slot])
        if agent is not None and agent.exit is not None:
            if crashed(draft, [slot], NO_STEP):
                return
            _relaunch(draft, agent, slot)
    _fill(draft, phase, held | phase.vacated)
    if all(name and draft.job.agents[name].endpoints for name in draft.job.slots):
        _start(draft)


def finish(draft: Draft) -> None:
    """Go over to training once every rank has entered its loop."""
    job = draft.job
    if not all(job.agents[name].is_ready for name in job.slots):
        return
    schemas = {
        rank: job.agents[name].schemas[worker]
        for slot, name in enumerate(job.slots)
        for rank, worker in enumerate(job.workers([name]), start=slot * job.nproc)
    }
    found = roles.found(schemas, job.nproc)
    draft.set(phase=Training(), schemas=schemas, roles=found, stumbles=0, held=job.in_force)
    draft.note(f"all {len(schemas)} ranks train in epoch {job.in_force}")


def restart(draft: Draft, why: str) -> None:
    """Start all workers afresh on the same slots; standbys take the slots of the lost."""
    job = draft.job
    draft.note(f"{why}: all workers start afresh")
    for name in draft.living(job.unreleased.values()):
        draft.dismiss(name, RELEASED)
    phase = Forming(since=job.epoch)
    draft.set(
        phase=phase,
        unreleased={},
        reports={},
        schemas={},
        roles=(),
        keepers=(),
        copies=0,
        placing=Placing.UNKNOWN,
        finished=frozenset(),
        verified=frozenset(),
        floor=None,
        held=0,
        opened={},
    )
    for slot, name in enumerate(job.slots):
        if name in draft.job.agents:
            _relaunch(draft, draft.job.agents[name], slot)
    _fill(draft, phase, set(range(job.nnodes)))
    draft.arm(Wait.FORM, job.epoch)


def overdue(draft: Draft) -> None:
    """End a wait that took too long: standbys replace who is missing, else the job fails."""
    job = draft.job
    if isinstance(job.phase, Starting):
        agents = [job.agents[name] for name in job.slots]
        late = ", ".join(agent.node for agent in agents if not agent.is_ready)
        draft.end(1, f"the workers on {late} did not enter the training loop in time")
        return
    up = {name for name, agent in job.agents.items() if agent.endpoints}
    missing = {slot for slot, name in enumerate(job.slots) if name not in up}
    if len(standby.spare(job)) < len(missing):
        names = ", ".join(str(slot) for slot in sorted(missing))
        draft.end(1, f"no workers came up in time for slot {names}")
        return
    for slot in sorted(missing):
        draft.lose(job.slots[slot], "its workers did not come up in time")
    since = draft.next_epoch()  # burnt: it only tells the new deadline from the old one
    draft.set(phase=Forming(since=since, vacated=frozenset(missing)))
    draft.arm(Wait.FORM, since)


def crashed(draft: Draft, slots: Iterable[int], step: int) -> bool:
    """Count the losses of these slots after `step`; end the job if it would go on like that."""
    for slot in slots:
        job = draft.job
        agent = job.agents.get(job.slots[slot])
        end = None if agent is None else agent.exit
        is_error = end is not None and end.is_error
        is_counted = (
            end is None or end.is_death if step == NO_STEP else 0 < job.in_force == job.held
        )
        is_loss = bool(job.slots[slot]) and is_counted
        is_joiner = bool(job.slots[slot]) and step != NO_STEP and 0 < job.held < job.in_force
        if not is_error and not is_loss and not is_joiner:
            continue
        had = job.crashes.get(slot)
        _, errors, losses, joiners = had if had is not None and had.step == step else Crashes(step)
        now = Crashes(step, errors + is_error, losses + is_loss, joiners + is_joiner)
        draft.set(crashes={**job.crashes, slot: now})
        verdict = _verdict(draft.job, slot, step)
        if verdict:
            code = 1 if end is None else end.job_code
            draft.end(code, f"{verdict}: {_last_words(job, slot)}")
            return True
    return False


def _verdict(job: Job, slot: int, step: int) -> str:
    """Return what ends the job, "" if nothing does. Before the first step all scripts are alike."""
    mine = job.crashes[slot]
    if step != NO_STEP and mine.errors == ERRORS:
        return f"the script on slot {slot} failed twice after step {step}"
    if step != NO_STEP and mine.losses == LOSSES:
        return f"slot {slot} was lost {LOSSES} times after step {step}"
    if mine.joiners == JOINERS:
        return f"{JOINERS} standbys in a row were lost while they took slot {slot} over"
    if step == NO_STEP and sum(c.errors for c in job.crashes.values() if c.step == step) >= ERRORS:
        when = "with no rank left to go on from" if job.schemas else "before its first step"
        return f"the script failed twice {when}, the last time on slot {slot}"
    if step == NO_STEP and mine.losses == 2 * standby.FAILURES:
        return f"slot {slot} was lost {mine.losses} times before its first step"
    return ""


def stumbled(draft: Draft) -> bool:
    """Count an attempt that failed with nobody lost; end the job at the third in a row."""
    tried = draft.job.stumbles + 1
    draft.set(stumbles=tried)
    if tried >= STUMBLES:
        draft.end(1, f"{tried} attempts in a row to form a world failed, though nobody was lost")
    return tried >= STUMBLES


def broke_again(draft: Draft, vacant: Collection[int], step: int) -> bool:
    """Count a whole world that broke after `step` with nobody lost; end the job at the third.

    No link explains that: what a communicator inside the groups cannot do, it cannot do again.
    """
    job = draft.job
    if vacant:
        draft.set(breaks=None)
    if vacant or not 0 < job.in_force == job.held:
        return False
    had = job.breaks or Breaks(step, job.slots)
    times = had.times + 1 if (had.step, had.slots) == (step, job.slots) else 1
    draft.set(breaks=Breaks(step, job.slots, times))
    if times < BREAKS:
        return False
    where = "before its first step" if step == NO_STEP else f"after step {step}"
    draft.end(
        1,
        f"the world broke {times} times {where} though nobody was lost: the workers' logs say what"
        ' failed; with [comm] fabric = "links" torch\'s own communicators are not used',
    )
    return True


def _last_words(job: Job, slot: int) -> str:
    """Return why the slot's holder was lost."""
    name = job.slots[slot]
    agent = job.agents.get(name)
    end = job.gone.get(name) if agent is None else agent.exit
    return "its agent is gone" if end is None else end.reason


def _free_slot(job: Job, event: Joined) -> int | None:
    if not isinstance(job.phase, Forming):
        return None
    free = [slot for slot, name in enumerate(job.slots) if not name]
    if event.standby:
        free = [slot for slot in free if slot in job.phase.vacated]
    return event.slot if event.slot in free else next(iter(free), None)


def _relaunch(draft: Draft, agent: Agent, slot: int) -> None:
    """Start the workers of a slot afresh; an agent whose workers never last loses its slot."""
    if agent.has_left:
        standby.part(draft, agent)
        return
    if agent.failures < standby.FAILURES:
        draft.note(f"the workers on {agent.node} are started afresh")
        draft.relaunch(agent, slot=slot, sandbox=False)
        return
    draft.note(f"the workers on {agent.node} ended {agent.failures} times: it is let go")
    draft.dismiss(agent.name, Farewell(1, f"its workers ended {agent.failures} times"))


def _fill(draft: Draft, phase: Forming, vacated: set[int]) -> None:
    """Put standbys on vacated slots, with fresh workers; order what is missing."""
    empty: set[int] = set()
    for slot in sorted(vacated):
        if draft.job.slots[slot] in draft.job.agents:
            continue
        agent = next(iter(standby.spare(draft.job)), None)
        if agent is None:
            draft.seat(slot, "")
            empty.add(slot)
        else:
            draft.note(f"{agent.node} takes slot {slot}")
            draft.relaunch(agent, slot=slot, sandbox=False)
            draft.seat(slot, agent.name)
    draft.set(phase=dataclasses.replace(phase, vacated=frozenset(empty)))
    draft.order(len(empty))


def _start(draft: Draft) -> None:
    epoch = draft.next_epoch()
    job = draft.job
    plan = job.world(epoch, job.slots)
    draft.set(plan=plan, phase=Starting())
    draft.note(f"all workers are up: epoch {epoch} begins")
    for name in job.slots:
        draft.do(Start(job=job.name, agent=name, plan=plan))
    draft.arm(Wait.FORM, epoch)
