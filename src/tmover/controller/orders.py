"""Standbys that were ordered, and of which the scheduler knows nothing any more.

One that is cancelled while it waits, or ends before it has joined, never says so. Without a look at
what is on order a job would wait for it until the deadline, and, with a vacant slot, not train.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tmover.core.events import StandbysGone
from tmover.core.roster import Job
from tmover.scheduler.interface import Allocation

_LEAST = 3
"""Polls in a row in which fewer are on order than were ordered, until they are ordered anew."""
_MOST = 48
"""As often at most: standbys that end at once are not to be ordered for ever without a pause."""


class _Short(NamedTuple):
    """How often in a row too few were on order, the last time at `at`."""

    polls: int
    at: float


class Orders:
    """Counts what is on order for each job."""

    def __init__(self, is_ordering: Callable[[str], bool]) -> None:
        """`is_ordering` says whether the scheduler has not taken all orders of a job yet."""
        self._is_ordering = is_ordering
        self._short: dict[str, _Short] = {}
        self._needed: dict[str, int] = {}
        """Polls that it takes now; twice as many each time, until nothing is on order."""

    def look(self, job: Job, found: Allocation) -> StandbysGone | None:
        """Return that the standbys on order are gone, if they are."""
        if not job.ordered.nodes:
            self._needed.pop(job.name, None)
        if self._is_ordering(job.name) or on_order(job, found) >= job.ordered.nodes:
            self._short.pop(job.name, None)
            return None
        before = self._short.get(job.name, _Short(0, -math.inf))
        if before.at == found.at:
            return None
        polls, needed = before.polls + 1, self._needed.get(job.name, _LEAST)
        self._short[job.name] = _Short(polls % needed, found.at)
        if polls < needed:
            return None
        self._needed[job.name] = min(2 * needed, _MOST)
        return StandbysGone(job=job.name, epoch=job.ordered.epoch)

    def forget(self, live: set[str]) -> None:
        """Forget the jobs that are not among `live`."""
        for known in (self._short, self._needed):
            for name in known.keys() - live:
                del known[name]


def on_order(job: Job, found: Allocation) -> int:
    """Return how many standbys wait, or are on a node where none has joined."""
    joined = {agent.node for agent in job.agents.values()}
    return len(found.standbys) - sum(node in joined for node in found.standby_nodes)
