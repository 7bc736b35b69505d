"""Where the ends of a new communicator find each other: values by key, told to every member.

No process is special: who sets a value sends it to all others, and what has come is kept here until
somebody asks. One thread reads, so nobody who builds has to wait for one who does not yet.
"""

from __future__ import annotations

import contextlib
import select
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from tmover.comm.frame import SEGMENT, Kind, Op, Stamp
from tmover.comm.latch import Latch
from tmover.comm.world import RENDEZVOUS, Peer
from tmover.errors import Interrupted, LinkError

_GLANCE_S = 0.25
_LENGTH = struct.Struct("<H")


class Until(NamedTuple):
    """How long to wait: until the deadline, or the latch is set."""

    latch: Latch
    deadline: float

    def check(self, waiting_for: str, peers: tuple[str, ...] = ()) -> float:
        """Return the seconds left. Raises `Interrupted` or `LinkError` if it is over."""
        if self.latch.is_set:
            raise Interrupted(self.latch.reason)
        left = self.deadline - time.monotonic()
        if left <= 0:
            msg = f"waited too long for {waiting_for}"
            raise LinkError(msg, peers)
        return left


class _Member:
    """The link to one peer, and what is half received on it."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.link = peer.lanes[RENDEZVOUS]
        self.sending = threading.Lock()
        self._data = bytearray()

    def read(self) -> Iterator[tuple[int, str, bytes]]:
        """Return the messages that have come: epoch, key and value."""
        link = self.link
        while True:
            head = link.head
            if head is None:
                head = link.next_head(ahead=True)
                if head is None:
                    return
                if head.kind != Kind.STORE or head.length > SEGMENT:
                    what = f"a frame of kind {head.kind} has no place here"
                    raise link.broken(what)
                self._data = bytearray(head.length)
            while link.left:
                if not link.read(memoryview(self._data)[len(self._data) - link.left :]):
                    return
            link.head = None
            yield head.epoch, *_unpack(self._data)

    def send(self, epoch: int, body: bytes, until: Until) -> None:
        """Send a message, after what another one has left unsent."""
        head = Stamp(Kind.STORE, Op.NONE, 0, epoch, 0, len(body)).head(len(body))
        with self.sending:
            self._flush(until)
            if not self.link.put(head, memoryview(body)):
                self._flush(until)

    def _flush(self, until: Until) -> None:
        while not self.link.flush():
            left = until.check(f"{self.peer.uid} to read", (self.peer.uid,))
            poller = select.poll()
            poller.register(until.latch.fd, select.POLLIN)
            poller.register(self.link.fd, select.POLLOUT)
            poller.poll(left * 1000 + 1)


class Rendezvous:
    """What was told, by epoch and key. Its thread exists from the first `join` to `close`."""

    def __init__(self) -> None:
        self.on_told: Callable[[int, str], None] | None = None
        """Called with the epoch and key of what has come. Must not wait for anything."""
        self._changed = threading.Condition()
        self._told: dict[tuple[int, str], bytes] = {}
        self._members: dict[Peer, _Member] = {}
        self._by_fd: dict[int, _Member] = {}
        self._broken: dict[Peer, LinkError] = {}
        self._wake = Latch()
        self._epoll = select.epoll()
        self._epoll.register(self._wake.fd, select.EPOLLIN)
        self._thread: threading.Thread | None = None

    # --- who is there -----------------------------------------------------------------------------

    def join(self, peer: Peer) -> None:
        """Listen to a peer, over its link, from now on."""
        member = _Member(peer)
        with self._changed:
            self._members[peer] = member
            self._by_fd[member.link.fd] = member
            self._epoll.register(member.link.fd, select.EPOLLIN)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="tmover-rendezvous", daemon=True
                )
                self._thread.start()

    def leave(self, peer: Peer) -> None:
        """Stop listening to a peer. Must come before its links are closed."""
        with self._changed:
            self._broken.pop(peer, None)
            member = self._members.pop(peer, None)
            if member is not None:
                self._forget_link(member)

    def _forget_link(self, member: _Member) -> None:
        if self._by_fd.get(member.link.fd) is member:
            del self._by_fd[member.link.fd]
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(member.link.fd)

    # --- telling and hearing ----------------------------------------------------------------------

    def tell(
        self, peers: Iterable[Peer], epoch: int, key: str, value: bytes, *, until: Until
    ) -> None:
        """Let `key` have this value, here and at `peers`. Raises `LinkError` or `Interrupted`."""
        body = _pack(key, value)
        self._keep(epoch, key, value)
        for peer in peers:
            member = self._members.get(peer)
            if member is None:
                msg = f"{peer.uid} is not there any more"
                raise LinkError(msg, (peer.uid,))
            member.send(epoch, body, until)

    def hear(
        self,
        epoch: int,
        wanted: Mapping[str, Peer | None],
        *,
        until: Until,
        among: Collection[Peer],
    ) -> list[bytes]:
        """Return the values of keys, once all are there; each may say who it has to come from.

        Raises `LinkError` if that takes too long or one of the peers `among` which they may come
        from is gone, and `Interrupted` once the latch is set.
        """
        with self._changed:
            while True:
                missing = [key for key in wanted if (epoch, key) not in self._told]
                if not missing:
                    return [self._told[epoch, key] for key in wanted]
                late = {peer.uid for key in missing if (peer := wanted[key]) is not None}
                for peer in among:
                    if peer in self._broken and (not late or peer.uid in late):
                        raise self._broken[peer].with_traceback(None)
                left = until.check(", ".join(late) or missing[0], tuple(sorted(late)))
                self._changed.wait(min(left, _GLANCE_S))

    def knows(self, epoch: int, keys: Iterable[str]) -> bool:
        """Return whether all these keys have values."""
        with self._changed:
            return all((epoch, key) in self._told for key in keys)

    def keys(self, epoch: int) -> list[str]:
        """Return the keys that have values in an epoch."""
        with self._changed:
            return [key for told_in, key in self._told if told_in == epoch]

    def forget(self, over: Callable[[int, str], bool]) -> None:
        """Forget what was told under epochs and keys that are over."""
        with self._changed:
            self._told = {key: value for key, value in self._told.items() if not over(*key)}

    def wake(self) -> None:
        """Let everybody who waits look at his latch."""
        with self._changed:
            self._changed.notify_all()

    def _keep(self, epoch: int, key: str, value: bytes) -> None:
        with self._changed:
            self._told[epoch, key] = value
            self._changed.notify_all()

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._wake.is_set:
            for fd, _ in self._epoll.poll():
                with self._changed:
                    member = self._by_fd.get(fd)
                if member is not None:
                    self._read(member)

    def _read(self, member: _Member) -> None:
        try:
            for epoch, key, value in member.read():
                self._keep(epoch, key, value)
                if self.on_told is not None:
                    self.on_told(epoch, key)
        except Exception as error:  # noqa: BLE001 - a thread's edge: who waits for him is told
            with self._changed:
                self._forget_link(member)
                if self._members.get(member.peer) is member:
                    why = error if isinstance(error, LinkError) else member.link.broken(error)
                    self._broken[member.peer] = why
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        self._wake.set("closed")
        if self._thread is not None:
            self._thread.join()
        self._epoll.close()
        self._wake.close()

    def close_in_child(self) -> None:
        """Close this process's copy of the poller, in a process that was forked from it."""
        self._epoll.close()


def _pack(key: str, value: bytes) -> bytes:
    """Return a message.

    >>> _unpack(_pack("name", b"value"))
    ('name', b'value')
    """
    name = key.encode()
    return _LENGTH.pack(len(name)) + name + value


def _unpack(data: bytes | bytearray) -> tuple[str, bytes]:
    """Return the key and value of a message. Raises `ValueError` if it is none."""
    if len(data) < _LENGTH.size:
        msg = "a message without a key"
        raise ValueError(msg)
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    return bytes(data[_LENGTH.size : end]).decode(), bytes(data[end:])
