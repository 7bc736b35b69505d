"""One wait for other ranks, charged to those of whom nothing has come yet.

Begun only when there is something to wait for, so it costs nothing where all has come already.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Mapping

from tmover.comm.idle import IDLE
from tmover.comm.link import Link


class Waiting:
    """From its making to `end`. All links are marked for whoever asks who is waited for now."""

    __slots__ = ("_began", "_silent", "links", "now")

    def __init__(self, links: Mapping[int, Link], silent: Iterable[int]) -> None:
        """`links` are all that are waited for, by descriptor; of those in `silent` nothing came."""
        self.links = links
        self._silent = set(silent)
        for link in links.values():
            link.is_awaited = True
        self._began = self.now = time.monotonic()

    def poll(self, poller: select.poll, deadline: float) -> list[tuple[int, int]]:
        """Return what is ready, none if nothing is before the deadline. Charges are up to now."""
        began = time.monotonic()
        events = poller.poll(max(0.0, deadline - began) * 1000)
        self.now = time.monotonic()
        IDLE.charge(self.now - began)
        return events

    def heard(self, fd: int) -> None:
        """Note that something has come: the rest of it is no lateness."""
        if fd in self._silent:
            self._silent.discard(fd)
            self.links[fd].waited_s += self.now - self._began

    def end(self) -> None:
        """Charge those that were waited for until now."""
        self.now = time.monotonic()
        for fd in self._silent:
            self.links[fd].waited_s += self.now - self._began
        for link in self.links.values():
            link.is_awaited = False
