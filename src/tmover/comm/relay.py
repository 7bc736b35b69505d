"""A chain of messages around a ring: what comes in goes out again, frame by frame.

Message i + 1 to the next rank is what message i from the rank before has become here. Nothing waits
for a whole message: a frame goes on as soon as it is in its place.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from tmover.comm.latch import Latch
from tmover.comm.link import Link
from tmover.comm.transfer import Receive, Send
from tmover.comm.waiting import Waiting
from tmover.errors import Interrupted, LinkError


class Relay:
    """As many messages in as out; all in over one link, all out over another (or the same)."""

    def __init__(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        self._sends = sends
        self._receives = receives
        self._sent = 0
        self._received = 0
        self._out: Link = sends[0].link
        self._in: Link = receives[0].link

    def run(self, latch: Latch, timeout_s: float) -> None:
        """Carry all of it out. Raises as `transfer` does."""
        if latch.is_set:
            raise Interrupted(latch.reason)
        try:
            self._run(latch, time.monotonic() + timeout_s)
        except BaseException:
            self._out.abandon()
            self._in.abandon()
            raise

    def _run(self, latch: Latch, deadline: float) -> None:
        count = len(self._sends)
        while True:
            while self._send() | self._receive():
                pass
            if self._sent == self._received == count:
                return
            poller = select.poll()
            poller.register(latch.fd, select.POLLIN)
            for fd, mask in self._waits().items():
                poller.register(fd, mask)
            events = self._poll(poller, deadline)
            if latch.is_set:
                raise Interrupted(latch.reason)
            if not events:
                peers = (self._in.peer, self._out.peer)
                msg = f"no progress with {' and '.join(peers)} in time"
                raise LinkError(msg, peers)

    def _poll(self, poller: select.poll, deadline: float) -> list[tuple[int, int]]:
        """Wait, and charge that to the rank before as long as nothing has come from it."""
        lacks = self._received < len(self._receives)
        links = {self._in.fd: self._in} if lacks else {}
        if self._out.unsent:
            links[self._out.fd] = self._out
        silent = not self._received and not self._receives[0].has_begun
        waiting = Waiting(links, [self._in.fd] if silent else [])
        try:
            return waiting.poll(poller, deadline)
        finally:
            waiting.end()

    def _waits(self) -> dict[int, int]:
        masks = {self._in.fd: select.POLLIN} if self._received < len(self._receives) else {}
        if self._out.unsent:
            masks[self._out.fd] = masks.get(self._out.fd, 0) | select.POLLOUT
        return masks

    def _send(self) -> bool:
        """Send what may go. Return whether a message is through."""
        if self._sent == len(self._sends):
            return False
        limit = None
        if self._sent >= self._received + 1:
            limit = self._receives[self._sent - 1].offset
        done = self._sends[self._sent].step(limit)
        self._sent += done
        return done

    def _receive(self) -> bool:
        """Receive a frame. Return whether one is complete."""
        if self._received == len(self._receives):
            return False
        receive = self._receives[self._received]
        done = receive.frame()
        if done and receive.complete:
            self._received += 1
        return done
