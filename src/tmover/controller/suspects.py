"""The controller's eyes on progress: which job stands still, for whom all wait, who is slow."""

from __future__ import annotations

from collections.abc import Iterable

from tmover.config import ControllerConfig
from tmover.controller.presence import Presence
from tmover.controller.stragglers import Stragglers, progress_of
from tmover.core.events import Straggling, Stuck
from tmover.core.phase import Stage
from tmover.core.progress import Limits, Standstill, Suspicion, suspicion
from tmover.core.roster import Job

_MOVING = frozenset({Stage.TRAINING, Stage.PREPARING, Stage.ARMED})


_GAP_S = 5.0


class Suspects:
    """Looks at all jobs again and again. Times are the caller's, in seconds."""

    def __init__(self, config: ControllerConfig, presence: Presence) -> None:
        self._limits = Limits(config.stuck_s, config.stuck_steps)
        self._presence = presence
        self.stragglers = Stragglers(config, presence)
        self._still: dict[str, Standstill] = {}
        self._found: dict[str, Suspicion] = {}
        self._looked_at = 0.0

    def look(self, jobs: Iterable[Job], now: float) -> list[Stuck | Straggling]:
        """Return the nodes to be given up, each once per standstill, and those that are slow.

        After a time in which nobody looked all begins anew: it was the controller that stood still.
        """
        still, found, news = self._still, self._found, list[Stuck | Straggling]()
        if now - self._looked_at > _GAP_S:
            still, found = {}, {}
            self.stragglers.forget()
        self._still, self._found, self._looked_at = {}, {}, now
        for job in jobs:
            news += self.stragglers.look(job, now)
            ranks = progress_of(job, self._presence)
            if job.phase.stage not in _MOVING or len(ranks) < job.nnodes * job.nproc:
                continue
            seen = still.get(job.name, Standstill()).seen(job.in_force, ranks, now)
            self._still[job.name] = seen
            suspect = suspicion(seen, ranks, self._limits, now)
            if suspect is None:
                continue
            self._found[job.name] = suspect
            was_certain = job.name in found and found[job.name].is_certain
            if suspect.is_certain and not was_certain:
                news += _stuck(job, suspect)
        return news

    def of(self, job: str) -> Suspicion | None:
        """Return what is suspected of a job."""
        return self._found.get(job)


def _stuck(job: Job, suspect: Suspicion) -> list[Stuck]:
    """Return the node on which all sit that everybody waits for; none if there are several."""
    slots = {rank // job.nproc for rank in suspect.ranks}
    if len(slots) != 1:
        return []
    agent = job.slots[slots.pop()]
    return [Stuck(job=job.name, agent=agent, epoch=job.in_force, reason=str(suspect))]
