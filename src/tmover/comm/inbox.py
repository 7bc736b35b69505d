"""Messages between two ranks, and how what comes is matched with what was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch

from tmover.comm import sandbox
from tmover.comm.frame import SEGMENT, Header, Kind, Op, Stamp
from tmover.comm.link import Link
from tmover.comm.shelf import Shelf
from tmover.comm.tensors import flat, give_back, view
from tmover.comm.transfer import SHORT, Burnt, Receive
from tmover.comm.untraced import untraced
from tmover.comm.work import Work
from tmover.comm.world import Peer, World
from tmover.errors import LinkError, ProtocolError

Drive = Callable[["Message", "float | None"], bool]
Watched = Callable[["Message"], None]
ANY = -1
_LIMIT = 1 << 40
"""No message is longer: it would fit nobody's memory."""


@untraced
class Message(Work):
    """A message that was posted; done once `conclude` was called."""

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        world: World,
        outgoing: bool,
        peer: int,
        tag: int,
        timeout_s: float,
    ) -> None:
        super().__init__([tensor], pending=True)
        self.world = world
        self.outgoing = outgoing
        self.peer = peer
        """The other end's rank in the group; of a receive from `ANY`, once it is known."""
        self.tag = tag
        self.strict = False
        self.drive: Drive | None = None
        """Moves messages until this one is done."""
        self.watched: Watched | None = None
        """Publishes it, where what follows from it may wait for other messages."""
        self.other: Peer | None = None
        """The process at the other end, if it is known."""
        self.deadline = time.monotonic() + timeout_s
        self.row = flat(tensor)
        self.data = view(self.row)
        self._tensor = tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when it is done, moving messages until it is; who waits is known meanwhile."""
        if self.drive is None or self.is_completed():
            return super().wait(timeout)
        seconds, other, began = timeout.total_seconds() or None, self.other, time.monotonic()
        if other is not None:
            other.awaited += 1
        try:
            if not self.drive(self, seconds):
                msg = f"a message was not through within {seconds:g} s"
                raise LinkError(msg)
        finally:
            if other is not None:
                other.awaited -= 1
                other.waited_s += 0.0 if self.outgoing else time.monotonic() - began
        return super().wait()

    def conclude(self, error: Exception | None = None) -> None:
        """Let who waits know that it is done; only the first time counts."""
        if self.is_completed():
            return
        self._error = error
        self._wake()
        if self.is_watched() and self.watched is not None:
            self.watched(self)
        else:
            self.publish()

    def arrived(self) -> None:
        """Conclude a receive whose data is in `row`."""
        try:
            if self.row is not self._tensor:
                with torch.no_grad():
                    give_back(self.row, self._tensor)
        except RuntimeError as error:  # of his tensor: it is told to who waits, not to who drives
            self.conclude(error)
        else:
            self.conclude()

    def blank(self) -> None:
        """Conclude without data that anybody will keep."""
        if not self.outgoing:
            sandbox.invent([self._tensor])
        self.conclude()

    def __str__(self) -> str:
        """Return what it is, for whoever is to find it in his script."""
        rank = "any rank" if self.peer == ANY else f"rank {self.peer}"
        way = "to" if self.outgoing else "from"
        return f"a message {way} {rank} with tag {self.tag}"

    def mismatch(self, size: int) -> ProtocolError | None:
        """Return what is wrong with receiving `size` bytes here."""
        wanted = len(self.data)
        if size == wanted:
            return None
        return ProtocolError(
            f"ranks do different things: rank {self.peer} sends a message with tag {self.tag} of "
            f"{size} bytes, this rank has a tensor of {wanted} bytes to receive it"
        )

    def source_rank(self) -> int:
        """Return the sender's rank."""
        return self.peer

    _source_rank = source_rank


class Answered(Work):
    """A message where there are no peers: done from the start."""

    def __init__(self, tensors: list[torch.Tensor], source: int) -> None:
        super().__init__(tensors)
        self._source = source

    def source_rank(self) -> int:
        """Return the rank it would have come from."""
        return self._source

    _source_rank = source_rank


class Incoming(Receive):
    """The next message of a link, whatever its tag; `choose` says where it is written."""

    def __init__(
        self, link: Link, epoch: int, burnt: Burnt, choose: Callable[[Header], memoryview]
    ) -> None:
        stamp = Stamp(Kind.P2P, Op.NONE, 0, epoch, 0, 0)
        super().__init__(link, stamp, memoryview(bytearray()), burnt)
        self._short = None
        self._choose = choose

    @property
    def under_way(self) -> bool:
        """Whether some of it has come."""
        return self.link.reader is self or self._offset > 0

    @property
    def tag(self) -> int:
        """The message's tag, once some of it has come."""
        return self._stamp.seq

    def _fits(self, head: Header) -> bool:
        if self._offset:
            return super()._fits(head)
        return (
            head.kind == Kind.P2P
            and head.total <= _LIMIT
            and head.length == min(SEGMENT, head.total)
        )

    def _room(self, head: Header) -> memoryview:
        if self._offset == 0:
            self._into = self._choose(head)
            self._size = head.total
            self._stamp = Stamp(*head[:5], head.total)
        return super()._room(head)


class Inbox:
    """What one rank sends here. `claim_any` finds a receive that takes it from whichever rank."""

    def __init__(self, rank: int, claim_any: Callable[[int], Message | None]) -> None:
        self._rank = rank
        self._claim_any = claim_any
        self._asked: Shelf[Message] = Shelf()
        self._unasked: Shelf[bytearray] = Shelf()
        self._incoming: Incoming | None = None
        self._target: Message | None = None
        self._spare: bytearray | None = None

    def ask(self, message: Message) -> bool:
        """Ask for a message; return whether it was there already."""
        data = self._unasked.take(message.tag)
        if data is not None:
            self._deliver(message, data)
            return True
        if message.peer != ANY:
            self._asked.put(message.tag, message)
        return False

    def wanted(self) -> bool:
        """Return whether something is to be read: asked for, or come in part."""
        under_way = self._incoming is not None and self._incoming.under_way
        return under_way or bool(self._asked)

    def waiting(self) -> list[Message]:
        """Return all that was asked for and has not come."""
        target = [self._target] if self._target is not None else []
        return [*target, *self._asked]

    def __len__(self) -> int:
        return len(self._asked) + (self._target is not None)

    def read(self, link: Link, epoch: int, burnt: Burnt) -> bool:
        """Read what has come. Return whether it was a whole message, and more may have come."""
        if self._incoming is None:
            if self._read_short(link, epoch):
                return True
            self._incoming = Incoming(link, epoch, burnt, self._choose)
        if not self._incoming.step():
            return False
        tag = self._incoming.tag
        self._incoming = None
        self._complete(tag)
        return True

    def _read_short(self, link: Link, epoch: int) -> bool:
        """Read what is asked for in one go, if there is one such message, and all of it is here."""
        message = self._asked.only()
        if message is None or len(message.data) > SHORT:
            return False
        stamp = Stamp(Kind.P2P, Op.NONE, 0, epoch, message.tag, len(message.data))
        if not link.exactly(stamp.head(stamp.total), message.data):
            return False
        self._asked.take(message.tag)
        message.peer = self._rank
        message.arrived()
        return True

    def _complete(self, tag: int) -> None:
        target, self._target = self._target, None
        spare, self._spare = self._spare, None
        if spare is None:
            if target is not None:
                target.arrived()
            return
        target = target or self._claim(tag)
        if target is None:
            self._unasked.put(tag, spare)
        else:
            self._deliver(target, spare)

    def put(self, tag: int, data: bytearray) -> None:
        """Take a message this rank has sent to itself."""
        self._spare = data
        self._complete(tag)

    def _claim(self, tag: int) -> Message | None:
        return self._asked.take(tag) or self._claim_any(tag)

    def _choose(self, head: Header) -> memoryview:
        self._target = self._claim(head.seq)
        if self._target is not None:
            self._target.peer = self._rank
            if self._target.mismatch(head.total) is None:
                return self._target.data
        self._spare = bytearray(head.total)
        return memoryview(self._spare)

    def _deliver(self, message: Message, data: bytearray) -> None:
        message.peer = self._rank
        error = message.mismatch(len(data))
        if error is None:
            message.data[:] = data
            message.arrived()
        else:
            message.conclude(error)
