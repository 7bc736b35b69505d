"""Things that wake a thread in `poll`: a latch once and for ever, a bell again and again.

Their descriptors live as long as anybody holds them, unless they are closed: so that no thread can
ever wait on a number that means something else by now.
"""

from __future__ import annotations

import contextlib
import os
import select


class _Waker:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def _write(self) -> None:
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the descriptor, when nobody waits any more; closing twice is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class Latch(_Waker):
    """Set once, with a reason. `fd` becomes readable then, and stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None

    @property
    def is_set(self) -> bool:
        """Whether it has happened."""
        return self.reason is not None

    def set(self, reason: str) -> None:
        """Wake everybody. Only the first reason is kept."""
        if self.reason is None:
            self.reason = reason
            self._write()

    def wait(self, timeout_s: float) -> None:
        """Return once it is set, or the time is up."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.poll(timeout_s * 1000)


class Bell(_Waker):
    """`fd` is readable from `ring` to `clear`."""

    def __init__(self) -> None:
        super().__init__()
        self._rung = False

    def ring(self) -> None:
        """Wake who waits, or who will wait next."""
        self._rung = True
        self._write()

    def clear(self, *, seen: bool = False) -> None:
        """Take note; call before looking at what it was rung for. `seen`: `fd` was readable."""
        if self._rung or seen:
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
