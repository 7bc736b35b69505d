"""What `tmover status` says of a wait for a node, and of the last move or failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tmover.core.incident import Incident
    from tmover.wire import JobStatus, WaitingStatus


def lines(status: JobStatus) -> Iterator[str]:
    """Yield a paragraph on each of the two, if there is one."""
    if status.waiting is not None:
        yield from ("", *_wait(status.waiting))
    if status.incidents:
        yield from ("", *_incident(status.incidents[-1]))


def _wait(wait: WaitingStatus) -> Iterator[str]:
    slots = ", ".join(map(str, wait.slots))
    yield f"waiting since {_clock(wait.since)} for a node for slot {slots}"
    for tried in wait.tried:
        yield f"  {tried}"
    if wait.until is None:
        yield "  it waits for ever ([deadlines] node_s = 0)"
    else:
        yield f"  at {_clock(wait.until)}: {wait.then}"


def _incident(incident: Incident) -> Iterator[str]:
    head = f"incident {incident.number}: {incident.kind}, {_clock(incident.began)}"
    yield f"{head}, {incident.outcome or 'under way'}: {incident.cause}"
    for lost in incident.lost:
        yield f"  {lost.node} lost: {lost.reason}"
    for each in incident.handings:
        yield f"  slot {each.slot}: {each.before or '-'} to {each.after}, {each.path}"
    marks = [f"{mark.name} +{mark.at - incident.began:.2f}" for mark in incident.marks]
    if marks:
        yield f"  s: {', '.join(marks)}"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
