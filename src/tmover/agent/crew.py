"""The processes of one launch: whether they live, how they ended, and that they end.

A worker's death is known when the kernel knows it (pidfd), not when torchrun looks next. One dead
worker ends its launch: the others can do nothing without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from typing import NamedTuple

from tmover.agent.launcher import Launch
from tmover.process import (
    ProcessId,
    descendants,
    describe,
    exit_status,
    identify,
    is_alive,
    is_stopped,
    open_pidfd,
    send_signal,
    wait_gone,
)

logger = logging.getLogger(__name__)

_DIE_S = 10.0


class Loss(NamedTuple):
    """How a launch ended."""

    code: int
    """Negative for a signal."""
    reason: str
    local_rank: int | None = None
    """Whose end it was; None if torchrun's own."""


class Crew:
    """Torchrun and the workers that have said hello."""

    def __init__(self, launch: Launch, *, nproc: int, stopped_s: float) -> None:
        self._launch = launch
        self._nproc = nproc
        self._stopped_s = stopped_s
        self._stopped_since: dict[int, float] = {}
        self._codes: dict[int, int | None] = {}
        """How workers ended, by local rank; None if torchrun collected them first."""
        self._watched: dict[int, ProcessId] = {}
        """By descriptor."""
        self.workers: dict[int, ProcessId] = {}
        """By local rank."""
        torchrun = identify(launch.pid)
        if torchrun is not None:
            self._watch(torchrun)

    @property
    def descriptors(self) -> Sequence[int]:
        """Readable when one of the processes has ended."""
        return list(self._watched)

    def add(self, local_rank: int, pid: int) -> None:
        """Take in the worker that has said hello."""
        worker = identify(pid)
        if worker is not None:
            self.workers[local_rank] = worker
            self._watch(worker)

    def lives(self) -> bool:
        """Whether all workers that said hello live and are not stopped."""
        workers = self.workers.values()
        return all(is_alive(worker) and not is_stopped(worker) for worker in workers)

    def loss(self, now: float) -> Loss | None:
        """Return how the launch ended, or None while it goes on."""
        self._watch_no_longer()
        for local_rank, worker in self.workers.items():
            found = self._look_at(local_rank, worker, now)
            if found is not None:
                return found
        if len(self._codes) == self._nproc and set(self._codes.values()) == {0}:
            return Loss(0, "all workers exited with code 0")
        code = self._launch.poll()
        if code is None:
            return None
        unknown = next((rank for rank, known in self._codes.items() if known is None), None)
        if code and unknown is not None:
            return Loss(code, f"worker {unknown} ended, torchrun {describe(code)}", unknown)
        return Loss(code, f"torchrun {describe(code)}")

    def signal(self, number: int, *, only: int | None = None) -> None:
        """Pass a signal on to the workers, or to one; to torchrun if there are none yet."""
        for local_rank, worker in self.workers.items():
            if only in (None, local_rank):
                send_signal(worker, number)
        if not self.workers and number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._launch.pid, number)

    def kill(self) -> set[ProcessId]:
        """Kill all processes of the launch, and what they started; return what still lived."""
        roots = [worker.pid for worker in self.workers.values() if is_alive(worker)]
        if self._launch.poll() is None:
            roots.append(self._launch.pid)
        left = descendants(*roots)
        for process in left:
            send_signal(process, signal.SIGKILL)
        return left

    def end(self) -> None:
        """Kill all processes of the launch, and what they started; return when they are gone."""
        left: set[ProcessId] = set()
        for _ in range(3):
            left = self.kill()
            left = wait_gone(left, timeout_s=_DIE_S)
            if not left and self._launch.poll() is not None:
                break
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()
        if left:
            pids = ", ".join(str(process.pid) for process in sorted(left))
            logger.error("processes %s do not end, though killed: they hang in the kernel", pids)

    def _look_at(self, local_rank: int, worker: ProcessId, now: float) -> Loss | None:
        if is_alive(worker):
            return self._stop_of(local_rank, worker, now)
        if local_rank not in self._codes:
            self._codes[local_rank] = exit_status(worker)
        code = self._codes[local_rank]
        if (
            not code
        ):  # 0: torchrun waits for the others; None: torchrun, which was quicker, acts on it
            return None
        return Loss(code, f"worker {local_rank} {describe(code)}", local_rank)

    def _stop_of(self, local_rank: int, worker: ProcessId, now: float) -> Loss | None:
        if not is_stopped(worker):
            self._stopped_since.pop(local_rank, None)
            return None
        since = self._stopped_since.setdefault(local_rank, now)
        if now - since < self._stopped_s:
            return None
        reason = f"worker {local_rank} was stopped by a signal for {self._stopped_s:g} s"
        return Loss(-signal.SIGSTOP, reason, local_rank)

    def _watch_no_longer(self) -> None:
        """Close the descriptors of processes that have ended: they would stay readable."""
        for fd, process in list(self._watched.items()):
            if not is_alive(process):
                os.close(fd)
                del self._watched[fd]

    def _watch(self, process: ProcessId) -> None:
        fd = open_pidfd(process)
        if fd is not None:
            self._watched[fd] = process
