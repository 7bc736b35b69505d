"""A link: one connection to one process, and what is half sent or half received on it.

Nothing here blocks. A message that is given up half way leaves at most one frame unfinished in each
direction: the sender pads it out before the next one, the reader reads it to its end and drops it.
"""

from __future__ import annotations

import select
import socket

from tmover.comm import nearby
from tmover.comm.frame import HEADER, KINDS, SEGMENT, Header, parse
from tmover.comm.timeouts import Timeouts
from tmover.errors import LinkError

AHEAD = 64 << 10
"""How far a reader of short messages reads ahead."""
_ZEROS = memoryview(bytes(1 << 18))
_NOTHING = memoryview(b"")


def tune(sock: socket.socket, timeouts: Timeouts, *, unacked_s: float) -> None:
    """Make a connected socket fast, nonblocking, and quick to notice a peer that is gone."""
    if sock.family == socket.AF_UNIX:
        nearby.tune(sock)
        return
    look_after(sock, timeouts, unacked_s=unacked_s)
    sock.settimeout(0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)


def look_after(sock: socket.socket, timeouts: Timeouts, *, unacked_s: float) -> None:
    """Send at once, and let a peer that is gone be noticed, whether it is spoken to or not.

    The kernel breaks a connection too when the other end lives and reads nothing for `unacked_s`;
    with 0 it does not: a peer may compute for long while it is sent more than the buffers hold.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, timeouts.idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, timeouts.interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, timeouts.probes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unacked_s * 1000))


def has_gone(sock: socket.socket) -> bool:
    """Return whether the other end has gone, and nothing that it said is still to be read.

    Of a link that has not been read from yet: without a word, cut, maybe, before it knew that it
    was let in. What has said something first is to be read to its end, whatever has become of it.
    """
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class Link:
    """One end of a connection. One thread at a time may send, and one may receive."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.is_accepted = False
        """Whether the other end has dialed."""
        self.is_heard = False
        """Whether anything has come over it."""
        self.head: Header | None = None
        """The frame being received."""
        self.left = 0
        """How much of its payload is still to come."""
        self.reader: object | None = None
        """Who receives it; None before somebody has claimed it."""
        self.is_awaited = False
        """Whether somebody waits until the other end does something."""
        self.waited_s = 0.0
        """How long was waited, in all, for messages of which nothing had come."""
        self._head_out = b""
        self._body_out = _NOTHING
        self._pad = 0
        self._partial = b""
        self._ahead = memoryview(bytearray(AHEAD))
        self._lo = self._hi = 0

    # --- sending ----------------------------------------------------------------------------------

    def put(self, head: bytes, body: memoryview = _NOTHING) -> bool:
        """Send a frame, after whatever is left of the one before. Return whether all of it went.

        May be called again only after `flush` has returned True.
        """
        self._head_out, self._body_out = head, body
        return self.flush()

    @property
    def unsent(self) -> bool:
        """Whether something waits until the connection takes more."""
        return bool(self._head_out or self._body_out or self._pad)

    def flush(self) -> bool:
        """Send what is left to send. Return whether nothing is left."""
        try:
            while self._head_out or self._body_out:
                sent = self.sock.sendmsg((self._head_out, self._body_out))
                rest = sent - len(self._head_out)
                self._head_out = self._head_out[sent:]
                if rest > 0:
                    self._body_out = self._body_out[rest:]
            while self._pad:
                self._pad -= self.sock.send(_ZEROS[: self._pad])
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.broken(error) from error
        return True

    # --- receiving --------------------------------------------------------------------------------

    def next_head(self, *, ahead: bool) -> Header | None:
        """Read the next frame's header, if it has come. `ahead`: and what follows, in one call."""
        size = HEADER.size
        if not self._partial and self._hi - self._lo >= size:
            self.head = parse(self._ahead[self._lo : self._lo + size])
            self._lo += size
        else:
            want = AHEAD if ahead else size - len(self._partial) - (self._hi - self._lo)
            self._partial += bytes(self._ahead[self._lo : self._hi])
            self._lo = self._hi = 0
            count = self._recv(self._ahead[:want])
            if count == 0:
                return None
            take = min(size - len(self._partial), count)
            self._partial += bytes(self._ahead[:take])
            self._lo, self._hi = take, count
            if len(self._partial) < size:
                return None
            self.head, self._partial = parse(self._partial), b""
        if self.head.kind not in KINDS or self.head.length > SEGMENT:
            why = "what comes from it is no frame"
            raise self.broken(why)
        self.left, self.reader = self.head.length, None
        return self.head

    def exactly(self, head: bytes, into: memoryview) -> bool:
        """Read a whole short frame in one call, if it has come and begins with just this header.

        Whatever else comes is kept for `next_head`.
        """
        if self.head is not None or self._partial or self._lo < self._hi:
            return False
        count = self._recv(self._ahead)
        start = len(head)
        end = start + len(into)
        self._lo, self._hi = 0, count
        if count < end or self._ahead[:start] != head:
            return False
        into[:] = self._ahead[start:end]
        self._lo = end
        return True

    def read(self, into: memoryview) -> int:
        """Read payload of the frame into `into`. Return how much had come."""
        if self._lo < self._hi:
            count = min(len(into), self._hi - self._lo)
            into[:count] = self._ahead[self._lo : self._lo + count]
            self._lo += count
        else:
            count = self._recv(into)
        self.left -= count
        return count

    def skip(self) -> bool:
        """Read the frame to its end and drop it. Return whether the end has come."""
        while self.left:
            buffered = min(self.left, self._hi - self._lo)
            self._lo += buffered
            self.left -= buffered
            if self.left:
                self._lo = self._hi = 0
                count = self._recv(self._ahead[: min(self.left, AHEAD)])
                if count == 0:
                    return False
                self.left -= count
        self.head = None
        return True

    def _recv(self, into: memoryview) -> int:
        try:
            count = self.sock.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.broken(error) from error
        if count == 0:
            why = "closed by the other end"
            raise self.broken(why)
        self.is_heard = True
        return count

    @property
    def is_readable(self) -> bool:
        """Whether anything has come that was not read yet, or the end."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return self._lo < self._hi or bool(poller.poll(0))

    # --- ending -----------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Let go of the memory of whoever was sending and receiving: its message is given up."""
        self._pad += len(self._body_out)
        self._body_out = _NOTHING
        if self.head is not None and self.reader is not None:
            self.reader = self

    def broken(self, why: object) -> LinkError:
        """Return the error that says why the link cannot be used any more."""
        return LinkError(f"link to {self.peer}: {why}", (self.peer,))

    @property
    def is_stillborn(self) -> bool:
        """Whether the dialer has gone without a word: as far as it knows, there is no link."""
        return self.is_accepted and not self.is_heard and has_gone(self.sock)

    def close(self) -> None:
        """Close the connection; closing twice is harmless."""
        self.sock.close()
