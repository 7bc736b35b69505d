"""Which links cannot be used again, though both of their ends live.

Both ends open a link for the same epoch. Who passes the barrier of that epoch uses it from then on;
who does not, closes it when it prepares the next one, and goes on with what it had before: nothing,
or a link that broke. So a pair of which not both have passed has no link, whatever one end thinks.

Nothing is to be noted of a world that all have passed, and of pairs that were in it together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tmover.core.events import Plan

if TYPE_CHECKING:
    from tmover.core.roster import Job

Pair = tuple[str, str]
"""Two workers, in order."""


def opened(
    job: Job, plan: Plan, newcomers: Iterable[str], relink: Iterable[Pair] = ()
) -> Mapping[Pair, int]:
    """Return what is opened since all have passed a world, once `plan` is in force.

    `newcomers` are linked to everybody, and the pairs in `relink` afresh.
    """
    members = [member.worker for member in plan.members]
    pairs = {_pair(new, other) for new in newcomers for other in members if other != new}
    pairs |= {_pair(*pair) for pair in relink}
    return {**job.opened, **dict.fromkeys(sorted(pairs), plan.epoch)}


def one_sided(job: Job) -> tuple[Pair, ...]:
    """Return the pairs of workers with ranks that have no link, as not both have passed."""
    passed = epochs(job)
    return tuple(
        pair
        for pair, epoch in job.opened.items()
        if passed.keys() >= set(pair) and min(passed[worker] for worker in pair) < epoch
    )


def newcomers(job: Job) -> list[str]:
    """Return the workers with ranks that are not known to be in the world in force, or any."""
    known = set() if job.plan is None else {member.worker for member in job.plan.members}
    return [worker for worker, epoch in epochs(job).items() if not epoch or worker not in known]


def epochs(job: Job) -> dict[str, int]:
    """Return the world that each worker with a rank has passed into last; 0 if it has not said."""
    workers = job.workers(job.slots)
    said = {report.worker: report.epoch for report in job.standings(workers)}
    return {worker: said.get(worker, 0) for worker in workers}


def _pair(one: str, other: str) -> Pair:
    first, second = sorted((one, other))
    return first, second
