"""Which nodes tmover's jobs must leave, and by when: what Slurm says in, a list out. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tmover.scheduler.interface import NodeState
from tmover.wire import JobStatus

if TYPE_CHECKING:
    from tmover.scheduler.slurm.commands import NodeDetail, Reservation

MAINT = "MAINT"
"""The flag of a reservation for maintenance."""


class Cause(NamedTuple):
    """Why a node is to be left. Of two causes the lesser is the more urgent."""

    due: float
    """When at the latest, in seconds since 1970; -inf is at once, inf whenever it can be."""
    what: str


class Vacate(msgspec.Struct, frozen=True, kw_only=True):
    """One node that one job is to leave."""

    node: str
    job: str
    what: str
    deadline: float | None = None
    """When the maintenance begins, in seconds since 1970; None if that is not known."""
    is_standby: bool = False
    """Whether the job has only a standby there."""
    slot: int | None = None
    """The place in the job that the node holds."""

    def __str__(self) -> str:
        """Return it for people, without what came of it."""
        due = "" if self.deadline is None else f", due {_clock(self.deadline)}"
        standby = " (standby)" if self.is_standby else ""
        return f"{self.node}: job {self.job}{standby}, {self.what}{due}"


def causes(
    reservations: Iterable[Reservation], nodes: Iterable[NodeDetail], now: float, lead_s: float
) -> dict[str, Cause]:
    """Return the nodes that must be left, and the most urgent cause of each."""
    found: dict[str, Cause] = {}
    for node, cause in (*_windows(reservations, now, lead_s), *_troubles(nodes)):
        found[node] = min(found.get(node, cause), cause)
    return found


def plan(
    reservations: Iterable[Reservation],
    nodes: Iterable[NodeDetail],
    jobs: Sequence[JobStatus],
    now: float,
    lead_s: float,
    only: Collection[str] | None = None,
) -> list[Vacate]:
    """Return what is to be left, in the order of asking.

    The job with the nearest deadline comes first; of each job the standbys, so that none of them
    becomes a joiner, and then the nodes with ranks by their deadline. With `only`, ranks leave no
    other nodes; the standbys of these jobs leave every node of which there is a cause.
    """
    found = causes(reservations, nodes, now, lead_s)
    lists = [_of_job(job, found, only) for job in jobs if job.code is None]
    lists = [sorted(some, key=lambda one: _order(one, found)) for some in lists if some]
    lists.sort(key=lambda some: min(found[one.node].due for one in some))
    return [one for some in lists for one in some]


def _windows(
    reservations: Iterable[Reservation], now: float, lead_s: float
) -> Iterator[tuple[str, Cause]]:
    for reservation in reservations:
        is_near = reservation.start <= now + lead_s and now < reservation.end
        if MAINT in reservation.flags and is_near:
            for node in reservation.nodes:
                yield node, Cause(reservation.start, f"reservation {reservation.name}")


def _troubles(nodes: Iterable[NodeDetail]) -> Iterator[tuple[str, Cause]]:
    for node in nodes:
        why = f": {node.reason}" if node.reason else ""
        if node.state in (NodeState.FAILING, NodeState.DOWN):
            yield node.name, Cause(-math.inf, f"{node.slurm_state.lower()}{why}")
        elif node.state in (NodeState.DRAINING, NodeState.DRAINED):
            what = "reboot asked for" if "REBOOT" in node.slurm_state.upper() else "drained"
            yield node.name, Cause(math.inf, what + why)


def _of_job(job: JobStatus, found: dict[str, Cause], only: Collection[str] | None) -> list[Vacate]:
    """Return what the job is to leave, in no order."""
    slots = {slot.node: slot.slot for slot in job.slots if slot.node in found}
    members = {node: slot for node, slot in slots.items() if only is None or node in only}
    standbys = {one.node for one in job.standbys if one.node in found} - slots.keys()
    if not members and only is not None:
        standbys &= set(only)
    return [
        *(_vacate(job, node, found[node], slot=slot) for node, slot in members.items()),
        *(_vacate(job, node, found[node], slot=None) for node in standbys),
    ]


def _vacate(job: JobStatus, node: str, cause: Cause, *, slot: int | None) -> Vacate:
    deadline = cause.due if math.isfinite(cause.due) else None
    return Vacate(
        node=node,
        job=job.job,
        what=cause.what,
        deadline=deadline,
        is_standby=slot is None,
        slot=slot,
    )


def _order(one: Vacate, found: dict[str, Cause]) -> tuple[bool, float, str]:
    return not one.is_standby, found[one.node].due, one.node


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


# --- what came of it ------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """Where the job's leaving of a node has come to."""

    text: str
    is_over: bool = False
    is_vacated: bool = False


def outcome(one: Vacate, status: JobStatus) -> Outcome:
    """Return where it has come to, after the controller was asked."""
    if status.code is not None:
        return Outcome("the job has ended", is_over=True, is_vacated=True)
    leavers = () if status.move is None else tuple(status.move.leaver.split(", "))
    if one.node not in {*status.nodes, *leavers}:
        return Outcome(_where_to(one, status), is_over=True, is_vacated=True)
    if one.node not in leavers or status.move is None:
        if status.phase == "training":
            why = next((note for note in reversed(status.notes) if one.node in note), "")
            return Outcome(f"given up{why and f' ({why})'}", is_over=True)
        return Outcome(f"the job is {status.phase}")
    if not status.move.epoch:
        return Outcome("it waits for a standby")
    return Outcome(f"{status.move.phase} in epoch {status.move.epoch}")


def _where_to(one: Vacate, status: JobStatus) -> str:
    if one.slot is None:
        return "its standby is released"
    taken = [slot.node for slot in status.slots if slot.slot == one.slot and slot.node]
    return f"vacated, its ranks are on {taken[0]}" if taken else "vacated"
