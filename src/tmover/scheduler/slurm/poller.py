"""One snapshot of Slurm for all jobs, no more often than it does slurmctld good."""

from __future__ import annotations

import threading
from collections.abc import Collection

import msgspec

from tmover.errors import SchedulerError
from tmover.scheduler.slurm.client import SlurmClient
from tmover.scheduler.slurm.commands import JobInfo, NodeDetail

POLL_S = 10.0
MOST_S = 60.0
LEAST_S = 1.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm said at one time. A job that is not in it is unknown, not finished."""

    jobs: tuple[JobInfo, ...]
    nodes: tuple[NodeDetail, ...]
    at: float


class Poller:
    """Keeps the last snapshot, and takes the next when that is due and somebody asks.

    It knows no time but what it is told; one clock has to do for all calls. Threads may share it.
    """

    def __init__(
        self,
        client: SlurmClient,
        *,
        users: Collection[str] | None = None,
        poll_s: float = POLL_S,
        most_s: float = MOST_S,
    ) -> None:
        self._client = client
        self._users = users
        self._poll_s = poll_s
        self._most_s = max(poll_s, most_s)
        self._wait_s = poll_s
        self._polled_at = float("-inf")
        self._is_nudged = False
        self._outcome: Snapshot | SchedulerError | None = None
        self._lock = threading.Lock()

    def snapshot(self, now: float) -> Snapshot:
        """Return the last snapshot if it is fresh, else a new one.

        While Slurm does not answer, raises what it last said, `SlurmUnreachable` as a rule, and
        asks it half as often each time.
        """
        with self._lock:
            if self._outcome is None or self._is_due(now):
                self._poll(now)
            if isinstance(self._outcome, Snapshot):
                return self._outcome
            assert self._outcome is not None  # noqa: S101 - polling leaves one or the other
            raise self._outcome.with_traceback(None)

    def trouble(self) -> str:
        """Return why the last poll came to nothing, "" if it did not."""
        outcome = self._outcome
        return str(outcome) if isinstance(outcome, SchedulerError) else ""

    def nudge(self) -> None:
        """Have the next call ask Slurm, though never twice within a second."""
        self._is_nudged = True

    def due_at(self) -> float:
        """Return the time from which on a call asks Slurm."""
        wait_s = min(LEAST_S, self._wait_s) if self._is_nudged else self._wait_s
        return self._polled_at + wait_s

    def _is_due(self, now: float) -> bool:
        return now >= self.due_at()

    def _poll(self, now: float) -> None:
        self._polled_at, self._is_nudged = now, False
        try:
            jobs, nodes = self._client.jobs(self._users), self._client.nodes()
        except SchedulerError as error:
            was_failing = isinstance(self._outcome, SchedulerError)
            self._wait_s = min(self._wait_s * 2, self._most_s) if was_failing else self._poll_s
            self._outcome = error
        else:
            self._wait_s = self._poll_s
            self._outcome = Snapshot(jobs=tuple(jobs), nodes=tuple(nodes), at=now)
