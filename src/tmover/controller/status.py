"""One job as a person wants to see it: what `decide` knows, and what heartbeats say."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tmover import wire
from tmover.controller import requests
from tmover.controller.desk import Desk, Ledger
from tmover.controller.presence import Presence, Seen, Who
from tmover.controller.rights import Rights, without_details
from tmover.controller.stragglers import progress_of
from tmover.controller.suspects import Suspects
from tmover.core import pool
from tmover.core.progress import lateness, straggler
from tmover.core.roster import Job
from tmover.core.view import MoveView, SlotView, StandbyView, WaitView, view
from tmover.errors import Refused
from tmover.scheduler.interface import Allocation

_THEN = "the survivors store a checkpoint, and the job ends with exit code 75"


class Views:
    """Looks at all jobs of a controller."""

    def __init__(
        self,
        desk: Desk,
        presence: Presence,
        suspects: Suspects,
        rights: Rights,
        node_s: float = 0.0,
    ) -> None:
        """`node_s`: how long a job stands still for want of a node, 0 is for ever."""
        self._node_s = node_s
        self._desk = desk
        self._ledgers = desk.ledgers
        self._presence = presence
        self._suspects = suspects
        self._rights = rights
        self.allocation: Callable[[str], Allocation | None] = lambda _: None
        """What the scheduler holds for a job, as far as it is known."""
        self.troubles: Callable[[str], tuple[str, ...]] = lambda _: ()
        """What the scheduler does not do for a job, for as long as it does not."""
        self.scheduler: Callable[[], str] = lambda: ""
        """How the scheduler is, in a few words."""

    def of(self, job: str) -> wire.JobStatus:
        """Return the status of one job."""
        status = of(self._ledgers[job], self._presence, node_s=self._node_s)
        held = self.allocation(job)
        shown = () if held is None else (held.text, *held.standbys)
        suspect = self._suspects.of(job)
        shared = [other.name for other in pool.partners(self._desk.jobs(), self._ledgers[job].job)]
        return msgspec.structs.replace(
            status,
            allocations=(*shown, *self.troubles(job)),
            pool=self._ledgers[job].job.pool,
            pool_jobs=tuple(shared),
            suspect="" if suspect is None else str(suspect),
            own=self._suspects.stragglers.of(job),
            slow=self._suspects.stragglers.sentence(job),
        )

    def reply(self, request: wire.StatusRequest, user: str = "") -> wire.AnyReply:
        """Return what is asked for, as far as the user may see it."""
        ledgers = self._rights.visible(user)
        try:
            jobs = requests.shown(ledgers, request)
        except Refused as refusal:
            return wire.RefusedReply(text=str(refusal))
        more = 0 if request.job is not None else len(ledgers) - len(jobs)
        shown = tuple(self._for(user, job) for job in jobs)
        asked = any(self._ledgers[job].job.allocated for job in jobs)
        return wire.StatusReply(jobs=shown, more=more, scheduler=self.scheduler() if asked else "")

    def _for(self, user: str, job: str) -> wire.JobStatus:
        status = self.of(job)
        return status if self._rights.sees(user, job) else without_details(status)

    def local_agents(self, node: str) -> list[Who]:
        """Return the agents on a node of the local scheduler."""
        on_node = self._presence.on_node(node)
        return [who for who in on_node if not self._ledgers[who.job].job.allocated]


def of(
    ledger: Ledger, presence: Presence, now: float | None = None, *, node_s: float = 0.0
) -> wire.JobStatus:
    """Return the job's status. `now` is the clock of `presence`."""
    now = time.monotonic() if now is None else now
    shown = view(ledger.job)

    def look(agent: str) -> Seen | None:
        return presence.seen(Who(shown.job, agent))

    slots = tuple(_slot(slot, look(slot.agent), now) for slot in shown.slots)
    return wire.JobStatus(
        job=shown.job,
        owner=shown.owner,
        phase=shown.phase,
        epoch=shown.epoch,
        step=min((slot.step for slot in slots if slot.step is not None), default=None),
        world_size=shown.world_size,
        slots=slots,
        standbys=tuple(_standby(one, look(one.agent), now) for one in shown.standbys),
        move=_move(shown.move),
        notes=tuple(ledger.notes),
        outcome=shown.outcome,
        code=shown.code,
        redundancy=shown.redundancy,
        copies=shown.copies,
        placing=shown.placing,
        waiting=_waiting(shown.waiting, node_s),
        incidents=shown.incidents,
        waits=() if shown.code is not None else _waits(ledger.job, presence),
    )


def _waiting(shown: WaitView | None, node_s: float) -> wire.WaitingStatus | None:
    if shown is None:
        return None
    until = shown.since + node_s if node_s else None
    return wire.WaitingStatus(
        since=shown.since, slots=shown.slots, tried=shown.tried, until=until, then=_THEN
    )


def _waits(job: Job, presence: Presence) -> tuple[wire.WaitStatus, ...]:
    ranks = progress_of(job, presence)
    late, worst = lateness(ranks), straggler(ranks)
    return tuple(
        wire.WaitStatus(
            rank=rank,
            node=job.agents[job.slots[rank // job.nproc]].node,
            per_step_s=round(late[rank], 6),
            steps=max(progress.steps for progress in ranks.values()),
            is_straggler=rank == worst,
        )
        for rank in sorted(late, key=late.__getitem__, reverse=True)
        if late[rank] > 0 and job.is_alive(job.slots[rank // job.nproc])
    )


def _slot(slot: SlotView, seen: Seen | None, now: float) -> wire.SlotStatus:
    return wire.SlotStatus(
        slot=slot.slot,
        node=slot.node,
        agent=slot.agent,
        state=slot.state,
        step=None if seen is None else min(seen.steps, default=None),
        heard_s=_heard(seen, now),
    )


def _standby(standby: StandbyView, seen: Seen | None, now: float) -> wire.StandbyStatus:
    return wire.StandbyStatus(
        node=standby.node,
        agent=standby.agent,
        state=standby.state,
        heard_s=_heard(seen, now),
        slot=standby.slot,
        takes=standby.takes,
        rehearsed=standby.rehearsed,
        rebuilds=standby.rebuilds,
        recorded=standby.recorded,
        warmth=standby.warmth,
        warm_s=None
        if standby.warmth is None
        else round(max(0.0, time.time() - standby.warm_at), 1),
    )


def _move(move: MoveView | None) -> wire.MoveStatus | None:
    if move is None:
        return None
    return wire.MoveStatus(
        phase=move.phase,
        leaver=move.leaver.replace(",", ", "),
        joiner=move.joiner.replace(",", ", "),
        epoch=move.epoch,
    )


def _heard(seen: Seen | None, now: float) -> float | None:
    return None if seen is None or not seen.has_spoken else round(max(0.0, now - seen.heard), 3)
