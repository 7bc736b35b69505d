"""Signals as something a poll loop can wait for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType, TracebackType


class SignalPipe:
    """Within its block, the given signals do nothing but become readable here.

    Those that were blocked and have come before become readable too.
    A signal that was ignored before stays ignored: `nohup` means it.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = list(numbers)
        self._before: dict[int, signal._HANDLER] = {}
        self._mask_before: set[int] = set()
        self._wakeup_before = -1
        self._read = self._write = -1

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._read

    def take(self) -> list[int]:
        """Return the signals that have come since the last call, oldest first."""
        try:
            return [number for number in os.read(self._read, 4096) if number in self._numbers]
        except BlockingIOError:
            return []

    def __enter__(self) -> SignalPipe:
        """Start to listen."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _nothing)
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put everything back as it was."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read)
        os.close(self._write)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Only the wake-up descriptor is of interest."""
