"""What happens to a local job, said as it happens."""

from __future__ import annotations

import select
import signal
import time
from typing import TYPE_CHECKING

from tmover.cli.text import plain
from tmover.errors import ControllerUnavailable, TmoverError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tmover.agent.signals import SignalPipe
    from tmover.cluster import LocalCluster
    from tmover.wire import JobStatus

_POLL_S = 0.25


def follow(
    cluster: LocalCluster,
    job: str,
    say: Callable[[str], object],
    *,
    show: Callable[[JobStatus], object] = lambda status: None,
    signals: SignalPipe | None = None,
    patience_s: float | None = None,
) -> int:
    """Say what happens until the job has ended; return its exit code, or that of a signal.

    A job of which nothing has run for `patience_s` (two leases) is given up.
    """
    from tmover.cli.watch import JobWatch

    patience_s = patience_s or 2 * cluster.config.controller.lease_s
    lookout = Lookout(cluster, job, say)
    watch, running_at = JobWatch(), time.monotonic()
    while not cluster.is_gone():
        status = lookout.look()
        if status is not None:
            for news in watch.look(status):
                say(plain(str(news)))
            show(status)
            if status.code is not None:
                say(f"job {job} has ended: {status.outcome}, exit code {status.code}")
                return status.code if status.code >= 0 else 128 - status.code
        if lookout.runs():
            running_at = time.monotonic()
        elif time.monotonic() - running_at > patience_s:
            say(f"nothing of job {job} runs any more; see the logs in {cluster.logs(job)}")
            return 1
        number = _wait(signals)
        if number is not None:
            say(f"{signal.Signals(number).name}: job {job} is cancelled")
            return 128 + number
    say(f"the state directory {cluster.state} is gone: job {job} can be reached no more, and ends")
    return 1


class Lookout:
    """Looks at one job. What keeps it from seeing is said once, and never ends the job.

    Training needs no controller: only the nodes tell whether the job lives when none answers.
    """

    def __init__(self, cluster: LocalCluster, job: str, say: Callable[[str], object]) -> None:
        self._cluster = cluster
        self._job = job
        self._say = say
        self._trouble = ""
        self._start_at = 0.0
        """When the next controller may be started; 0 unless the last one did not start."""

    def look(self) -> JobStatus | None:
        """Return how the job is, or None if that cannot be told; have a controller run."""
        try:
            if self._cluster.controller() is None:
                self._start()
            status = self._cluster.status(self._job)
        except TmoverError as error:
            self._note(str(error))
            return None
        self._trouble = ""
        return status

    def runs(self) -> bool:
        """Return whether something of the job runs; also if that cannot be told."""
        try:
            return bool(self._cluster.scheduler.running(self._job))
        except TmoverError as error:
            self._note(str(error))
            return True

    def _start(self) -> None:
        """Start a controller; one that does not start is tried again a lease later."""
        if time.monotonic() < self._start_at:
            raise ControllerUnavailable(self._trouble)
        if not self._start_at:
            self._say("the controller is gone; the job goes on, starting another one")
        self._start_at = time.monotonic() + self._cluster.config.controller.lease_s
        self._cluster.ensure_controller()
        self._start_at = 0.0

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._say(f"{trouble}; job {self._job} goes on, this is tried again")
        self._trouble = trouble


def _wait(signals: SignalPipe | None) -> int | None:
    """Wait until it is time to look again; return the signal that came instead, if one did."""
    sources = [] if signals is None else [signals]
    select.select(sources, [], [], _POLL_S)
    return next((number for source in sources for number in source.take()), None)
