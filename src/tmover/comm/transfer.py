"""Move several messages over several links at once, until all are through or it is over."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tmover.comm.frame import SEGMENT, Header, Kind, Stamp, describe
from tmover.comm.latch import Latch
from tmover.comm.link import AHEAD, Link
from tmover.comm.waiting import Waiting
from tmover.errors import Interrupted, LinkError, ProtocolError

SHORT = AHEAD // 2
"""Messages up to here are read through a buffer, with whatever comes after them."""
_IN = select.POLLIN | select.POLLERR | select.POLLHUP | select.POLLNVAL
_OUT = select.POLLOUT | select.POLLERR | select.POLLHUP | select.POLLNVAL
VARIABLE_LIMIT = 1 << 28
"""The longest message whose length the receiver does not know."""

Burnt = Callable[[int], bool]
"""Whether an epoch was rolled back: its frames mean nothing though their number is higher."""


class Onto(NamedTuple):
    """What a message is folded onto."""

    size: int
    fold: Callable[[int, int], None]
    """Called with the offset and the length of each frame that lies in the scratch memory."""


class Send:
    """A message on its way out."""

    def __init__(self, link: Link, stamp: Stamp, view: memoryview) -> None:
        self.link = link
        self._stamp = stamp
        self._view = view
        self._offset = -1
        """How much was given to the link; -1 before the first frame, which may be empty."""

    def step(self, limit: int | None = None) -> bool:
        """Send what goes without waiting, up to `limit`. Return whether everything has gone."""
        link, size = self.link, len(self._view)
        if not link.flush():
            return False
        while self._offset < size:
            start = max(0, self._offset)
            end = min(size, start + SEGMENT)
            if limit is not None and end > limit:
                return False
            self._offset = end
            if not link.put(self._stamp.head(end - start), self._view[start:end]):
                return False
        return True


class Receive:
    """A message on its way in, written straight to where it belongs."""

    def __init__(self, link: Link, stamp: Stamp, into: memoryview, burnt: Burnt) -> None:
        self.link = link
        self._stamp = stamp
        self._into = into
        self._size = len(into)
        self._offset = 0
        self._frame = _NO_ROOM
        self._got = 0
        self._burnt = burnt
        self._short = stamp.head(self._size) if self._size == stamp.total <= SHORT else None

    @property
    def offset(self) -> int:
        """How much of it is in its place, in whole frames."""
        return self._offset

    def step(self) -> bool:
        """Receive what has come. Return whether the message is complete."""
        if self._short is not None:
            if self.link.exactly(self._short, self._into):
                return True
            self._short = None
        while self.frame():
            if self.complete:
                return True
        return False

    def frame(self) -> bool:
        """Receive what has come of one frame. Return whether it is complete."""
        link = self.link
        if link.reader is not self and not self._claim():
            return False
        while link.left:
            count = link.read(self._frame[self._got :])
            if count == 0:
                return False
            self._got += count
        link.head = link.reader = None
        self._done()
        return True

    @property
    def has_begun(self) -> bool:
        """Whether any of it has come."""
        return self._offset > 0 or self.link.reader is self

    @property
    def complete(self) -> bool:
        """Whether all frames have come, of a message of which one has."""
        return self._offset >= self._size

    def _claim(self) -> bool:
        """Find the frame this message goes on with. Return False if it has not come yet."""
        link = self.link
        while True:
            if link.reader is not None and not link.skip():
                return False
            head = link.head or link.next_head(ahead=self._size <= SHORT)
            if head is None:
                return False
            epoch = self._stamp.epoch
            if head.epoch < epoch or (head.epoch > epoch and self._burnt(head.epoch)):
                link.reader = link
                continue
            self._check(head)
            self._frame, self._got = self._room(head), 0
            link.reader = self
            return True

    def _check(self, head: Header) -> None:
        """Raise what is to be raised if the frame is not the one this message goes on with."""
        if head.epoch > self._stamp.epoch:
            msg = f"{self.link.peer} is in epoch {head.epoch} already"
            raise Interrupted(msg)
        if head.kind == Kind.BYE:
            left = "it has left"
            raise self.link.broken(left)
        if not self._fits(head):
            theirs = describe(head.kind, head.op, head.seq, head.total)
            msg = (
                f"ranks do different things: {self.link.peer} sends {theirs}"
                f"{self._difference(head)}, this rank waits for {self._stamp}"
            )
            raise ProtocolError(msg)

    def _difference(self, head: Header) -> str:
        alike = self._stamp._replace(detail=head.detail).matches(head)
        return " of another type, reduction or root" if alike else ""

    def _fits(self, head: Header) -> bool:
        length = min(SEGMENT, self._size - self._offset)
        return self._stamp.matches(head) and head.length == length

    def _room(self, head: Header) -> memoryview:
        """Return where the payload of the frame goes."""
        return self._into[self._offset : self._offset + head.length]

    def _done(self) -> None:
        """Note that the frame is complete."""
        self._offset += len(self._frame)


class Fold(Receive):
    """A message that is folded into what is there, frame by frame."""

    def __init__(
        self, link: Link, stamp: Stamp, scratch: memoryview, burnt: Burnt, *, onto: Onto
    ) -> None:
        super().__init__(link, stamp, scratch, burnt)
        self._short = None
        self._size = onto.size
        self._fold = onto.fold

    def _room(self, head: Header) -> memoryview:
        return self._into[: head.length]

    def _done(self) -> None:
        self._fold(self._offset, len(self._frame))
        super()._done()


class Collect(Receive):
    """A message whose length only its sender knows."""

    def __init__(self, link: Link, stamp: Stamp, burnt: Burnt) -> None:
        super().__init__(link, stamp, _NO_ROOM, burnt)
        self._short = None
        self.data = bytearray()

    def _fits(self, head: Header) -> bool:
        if self._offset:
            return super()._fits(head)
        length = min(SEGMENT, head.total)
        return (
            head[:5] == self._stamp[:5] and head.total <= VARIABLE_LIMIT and head.length == length
        )

    def _room(self, head: Header) -> memoryview:
        if self._offset == 0:
            self.data = bytearray(head.total)
            self._size = head.total
            self._stamp = self._stamp._replace(total=head.total)
        return memoryview(self.data)[self._offset : self._offset + head.length]


_NO_ROOM = memoryview(bytearray())


def transfer(
    sends: Sequence[Send], receives: Sequence[Receive], latch: Latch, timeout_s: float
) -> None:
    """Carry out all of it at once; nothing is waited for longer than the whole takes.

    Raises `LinkError` if a link breaks or nothing moves before the deadline, `Interrupted` if the
    latch is set first, and `ProtocolError` if a peer does something else.
    """
    if latch.is_set:
        raise Interrupted(latch.reason)
    try:
        outgoing = {send.link.fd: send for send in sends if not send.step()}
        incoming = {receive.link.fd: receive for receive in receives if not receive.step()}
        if outgoing or incoming:
            _wait(outgoing, incoming, latch, timeout_s)
    except BaseException:
        for link in [send.link for send in sends] + [receive.link for receive in receives]:
            link.abandon()
        raise


def _wait(
    outgoing: dict[int, Send], incoming: dict[int, Receive], latch: Latch, timeout_s: float
) -> None:
    links = {fd: send.link for fd, send in outgoing.items()}
    links |= {fd: receive.link for fd, receive in incoming.items()}
    waiting = Waiting(links, [fd for fd, receive in incoming.items() if not receive.has_begun])
    try:
        _go_on(outgoing, incoming, latch, timeout_s, waiting)
    finally:
        waiting.end()


def _go_on(
    outgoing: dict[int, Send],
    incoming: dict[int, Receive],
    latch: Latch,
    timeout_s: float,
    waiting: Waiting,
) -> None:
    deadline = waiting.now + timeout_s
    poller = select.poll()
    poller.register(latch.fd, select.POLLIN)
    for fd in outgoing.keys() | incoming.keys():
        poller.register(fd, _mask(fd, outgoing, incoming))
    while outgoing or incoming:
        events = waiting.poll(poller, deadline)
        if not events:
            raise _late(outgoing, incoming, timeout_s)
        for fd, mask in events:
            if fd == latch.fd:
                raise Interrupted(latch.reason)
            sent = mask & _OUT and fd in outgoing and outgoing[fd].step()
            received = mask & _IN and fd in incoming and incoming[fd].step()
            if mask & select.POLLIN:
                waiting.heard(fd)
            if sent:
                del outgoing[fd]
            if received:
                del incoming[fd]
            if sent or received:
                left = _mask(fd, outgoing, incoming)
                waiting.links[fd].is_awaited = left != 0
                _watch(poller, fd, left)


def _mask(fd: int, outgoing: dict[int, Send], incoming: dict[int, Receive]) -> int:
    return (select.POLLOUT if fd in outgoing else 0) | (select.POLLIN if fd in incoming else 0)


def _watch(poller: select.poll, fd: int, mask: int) -> None:
    if mask:
        poller.modify(fd, mask)
    else:
        poller.unregister(fd)


def _late(outgoing: dict[int, Send], incoming: dict[int, Receive], timeout_s: float) -> LinkError:
    links = [send.link for send in outgoing.values()] + [item.link for item in incoming.values()]
    peers = tuple(sorted({link.peer for link in links}))
    return LinkError(f"nothing from {', '.join(peers)} within {timeout_s:g} s", peers)
