"""An event loop whose time passes only when a test says so, in one thread.

What asyncio would have a thread do is done on the spot. So a program under it does the same each
time, and hours cost nothing.
"""

from __future__ import annotations

import asyncio
import collections
import selectors
from collections.abc import Callable
from typing import Any


class _Impatient(selectors.DefaultSelector):
    """Looks at what has come, and never waits for more."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        del timeout
        return super().select(0)


class Clockwork(asyncio.SelectorEventLoop):
    """Runs what is due, moment by moment."""

    _ready: collections.deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__(_Impatient())
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Do it at once: nothing runs beside the loop."""
        del executor
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            done.set_exception(error)
        return done

    def settle(self) -> None:
        """Do all that can be done at this moment."""
        while True:
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready and not self._is_due():
                return

    def next_at(self) -> float | None:
        """Return when the next timer is due, None if none runs."""
        running = [handle.when() for handle in self._scheduled if not handle.cancelled()]
        return min(running, default=None)

    def _is_due(self) -> bool:
        at = self.next_at()
        return at is not None and at <= self.now

    def forget(self) -> None:
        """Drop the timers of what is gone."""
        for handle in list(self._scheduled):
            handle.cancel()
