"""The communicator inside a group: built at most once, at first use or ahead, and aborted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from tmover.comm.stock import Communicator, Stock
from tmover.errors import Interrupted, LinkError


class Inner:
    """What one group uses, on one type of device, for as long as the same processes are in it."""

    def __init__(self, stock: Stock, ranks: tuple[int, ...]) -> None:
        self.stock = stock
        self.ranks = ranks
        self.aborted = ""
        """Why it cannot be used any more."""
        self.whole = False
        """Whether every member is known to have built it."""
        self._failed: LinkError | None = None
        self._building = threading.Lock()
        self._communicator: Communicator | None = None
        self._timeout_s = 0.0

    def get(self, build: Callable[[], Communicator], *, timeout_s: float) -> Communicator:
        """Return it, built if need be; its collectives may take `timeout_s`.

        Raises as `build` does, each time, and `Interrupted` if it is aborted.
        """
        communicator = self._communicator
        if communicator is None:
            with self._building:
                communicator = self._communicator = self._communicator or self._built(build)
        if self.aborted:
            communicator.abort()
            raise Interrupted(self.aborted)
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            communicator.backend.set_timeout(timedelta(seconds=timeout_s))
        return communicator

    def _built(self, build: Callable[[], Communicator]) -> Communicator:
        """Build it once: who comes later is told what who came first was."""
        if self._failed is not None:
            raise self._failed.with_traceback(None)
        try:
            return build()
        except LinkError as error:
            self._failed = error
            raise

    @property
    def communicator(self) -> Communicator | None:
        """What is there at the moment."""
        return self._communicator

    def abort(self, reason: str) -> None:
        """End what is under way, and let nothing begin any more. Twice is harmless."""
        self.aborted = self.aborted or reason
        communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    def drop(self) -> None:
        """Let go of it."""
        self.aborted = self.aborted or "it was dropped"
        self._communicator = None

    def disown(self) -> None:
        """Close its sockets in a process that was forked from this one."""
        if self._communicator is not None:
            self._communicator.disown()
