"""SIGUSR1 at a worker: the job is asked for a checkpoint, as its time limit is near.

Slurm's `--signal` and `scancel --signal` reach all processes of all job steps, at different
moments, and whoever does not handle SIGUSR1 or SIGUSR2 dies of it. So a worker is started with both
blocked, hears what came meanwhile once it handles them, and starts loader workers with both blocked
again; those that are forked inherit the handlers. A handler of the script's own replaces these.
"""

from __future__ import annotations

import functools
import multiprocessing.util
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from tmover.process import SPARED

_SAME_S = 1.0
"""Signals within this time are one request: an agent passes on what its workers also get."""


class CheckpointSignal:
    """Counts requests. Its handler runs between any two instructions of the main thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = self._taken = 0
        self._known_at = float("-inf")

    def note(self, number: int = signal.SIGUSR1, frame: FrameType | None = None) -> None:
        """Be asked for a checkpoint (a signal handler)."""
        now = self._clock()
        if now - self._known_at >= _SAME_S:
            self._known_at = now
            self._asked += 1

    def take(self) -> bool:
        """Return whether a checkpoint was asked for since the last call."""
        asked, before = self._asked, self._taken
        self._taken = asked
        return asked != before

    def answered(self) -> None:
        """Note that a checkpoint is taken: a signal that is late is no request for another."""
        self._known_at = self._clock()


@functools.cache
def listen() -> CheckpointSignal:
    """Handle SIGUSR1 and SIGUSR2 from the first call on, unless something else does already."""
    requests = CheckpointSignal()
    if threading.current_thread() is not threading.main_thread():
        return requests  # Python lets no other thread set a handler
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, requests.note)
        signal.siginterrupt(signal.SIGUSR1, False)  # noqa: FBT003 - it takes no keyword
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    multiprocessing.util.spawnv_passfds = _sparing(multiprocessing.util.spawnv_passfds)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SPARED)
    return requests


def _sparing(spawn: Callable[..., int]) -> Callable[..., int]:
    """Return what starts a process of multiprocessing, "spawn" or "forkserver", with both blocked.

    It replaces the program, and with it what handles its signals; what is blocked stays blocked.
    """

    def spawn_sparing(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SPARED)
        try:
            return spawn(path, args, passfds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return spawn_sparing
