"""Where links arrive: one socket per process, one thread that lets in who belongs here.

An accepted link is parked until somebody takes it, so nobody waits for a peer that is still busy.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from tmover.comm import nearby
from tmover.comm.handshake import Acceptor, Hello
from tmover.comm.latch import Latch
from tmover.comm.link import has_gone
from tmover.errors import Interrupted, LinkError, ProtocolError

logger = logging.getLogger(__name__)

_GLANCE_S = 0.25
_REST_S = 0.1
_MOST_VISITORS = 512
"""Handshakes under way at once. Who does not hold the secret cannot use up what the rank needs."""
_PATIENCE_S = 1.0
"""For so long a visitor stays though others wait; a handshake takes milliseconds."""
_BREATH_S = 0.01
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Key(NamedTuple):
    """What a link is for."""

    group: str
    lane: str
    peer: str


class Late(LinkError, TimeoutError):
    """Nobody came in time."""


class _Parked(NamedTuple):
    epoch: int
    sock: socket.socket


class _Visitor:
    """A connection whose handshake is under way."""

    def __init__(self, sock: socket.socket, acceptor: Acceptor, deadline: float) -> None:
        self.sock = sock
        self.acceptor = acceptor
        self.deadline = deadline


class Listener:
    """Accepts, authenticates and parks links. `check` says why a hello is refused, or nothing."""

    def __init__(
        self, address: str, *, secret: bytes, check: Callable[[Hello], str], handshake_s: float
    ) -> None:
        self._secret = secret
        self._check = check
        self._handshake_s = handshake_s
        self._socket = socket.create_server((address, 0), backlog=1024)
        self._socket.settimeout(0)
        host, port = self._socket.getsockname()[:2]
        self.endpoint = f"{host}:{port}"
        self._near = nearby.listen(self.endpoint)
        self._arrived = threading.Condition()
        self._parked: dict[Key, _Parked] = {}
        self._visitors: set[_Visitor] = set()
        self._room = min(_MOST_VISITORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._subscribers: dict[tuple[str, str], Callable[[], None]] = {}
        self._failed = False
        """Whether a visitor could not be heard through no fault of his: the log says so once."""
        self._wake = Latch()
        self._selector = selectors.DefaultSelector()
        for sock in self._doors():
            self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wake.fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="tmover-listen", daemon=True)
        self._thread.start()

    # --- for those who wait -----------------------------------------------------------------------

    def take(self, key: Key, *, since: int, latch: Latch, deadline: float) -> socket.socket:
        """Return the link for `key` that was opened in epoch `since` or later.

        One whose dialer has gone without a word is dropped, and another one waited for.
        Raises `Late` after the deadline, `Interrupted` once the latch is set.
        """
        with self._arrived:
            while True:
                sock = self._claim(key, since)
                if sock is not None:
                    return sock
                if latch.is_set:
                    raise Interrupted(latch.reason)
                left = deadline - time.monotonic()
                if left <= 0:
                    msg = f"no link came from {key.peer} in time"
                    raise Late(msg, (key.peer,))
                self._arrived.wait(min(left, _GLANCE_S))

    def glance(self, key: Key, *, since: int) -> socket.socket | None:
        """Return the link for `key` if it is there already, and its dialer too."""
        with self._arrived:
            return self._claim(key, since)

    def subscribe(self, group: str, lane: str, callback: Callable[[], None]) -> None:
        """Call back whenever such a link arrives, in the listener's thread and lock."""
        with self._arrived:
            self._subscribers[group, lane] = callback

    def unsubscribe(self, group: str, lane: str) -> None:
        """Call nobody back any more."""
        with self._arrived:
            self._subscribers.pop((group, lane), None)

    def kick(self) -> None:
        """Let everybody who waits look at his latch."""
        with self._arrived:
            self._arrived.notify_all()

    def discard(self, unwanted: Callable[[Key, int], bool]) -> None:
        """Close parked links of which `unwanted(key, epoch)` says so."""
        with self._arrived:
            for key, parked in list(self._parked.items()):
                if unwanted(key, parked.epoch):
                    self._parked.pop(key).sock.close()

    def _claim(self, key: Key, since: int) -> socket.socket | None:
        parked = self._parked.get(key)
        if parked is None or parked.epoch < since:
            return None
        sock = self._parked.pop(key).sock
        if has_gone(sock):
            sock.close()
            return None
        return sock

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._wake.is_set:
            timeout = 1.0 if self._visitors else None
            for key, _ in self._selector.select(timeout):
                if key.fileobj in self._doors():
                    self._accept(key.fileobj)
                elif key.data is not None:
                    self._receive(key.data)
            now = time.monotonic()
            for visitor in [v for v in self._visitors if v.deadline < now]:
                self._dismiss(visitor, "did not finish its handshake in time")

    def _doors(self) -> list[socket.socket]:
        """Return the sockets at which visitors knock."""
        return [self._socket] if self._near is None else [self._socket, self._near]

    def _accept(self, door: socket.socket) -> None:
        """Let a visitor in. Who cannot be now, for want of descriptors or memory, is in a while."""
        if len(self._visitors) >= self._room and not self._make_room():
            self._wake.wait(_BREATH_S)
            return
        try:
            sock, _ = door.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._complain("a link has to wait: %s", error)
                self._wake.wait(_REST_S)
            return
        with contextlib.suppress(OSError):
            if door is self._near and not nearby.is_ours(sock):
                sock.close()
                return
            sock.settimeout(0)
            deadline = time.monotonic() + self._handshake_s
            visitor = _Visitor(sock, Acceptor(self._secret, self._check), deadline)
            self._visitors.add(visitor)
            self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _make_room(self) -> bool:
        """Dismiss who has taken longest, if that is long; return whether somebody was."""
        oldest = min(self._visitors, key=lambda visitor: visitor.deadline)
        if oldest.deadline - self._handshake_s + _PATIENCE_S > time.monotonic():
            return False
        self._dismiss(oldest, "took long, and others wait")
        return True

    def _receive(self, visitor: _Visitor) -> None:
        """Hear a visitor. Whatever goes wrong with him ends his visit, and nobody else's."""
        try:
            self._talk(visitor)
        except Exception as error:  # noqa: BLE001 - a thread's edge: without it no link is opened
            self._complain("a handshake failed: %r", error)
            self._dismiss(visitor, repr(error))

    def _complain(self, what: str, error: Exception) -> None:
        level = logging.DEBUG if self._failed else logging.WARNING
        self._failed = True
        logger.log(level, what, error, exc_info=error)

    def _talk(self, visitor: _Visitor) -> None:
        """Go on with one handshake. Its messages are short: they fit any socket's buffer."""
        acceptor = visitor.acceptor
        try:
            data = visitor.sock.recv(acceptor.needs)
            if not data:
                self._dismiss(visitor, "hung up")
                return
            reply = acceptor.feed(data)
            with self._arrived:  # whoever the dialer tells that it is open, finds it here
                if reply:
                    visitor.sock.send(reply)
                if acceptor.hello is not None:
                    self._park(visitor, acceptor.hello)  # only now may its taker speak first
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._dismiss(visitor, str(error))
            return
        if acceptor.refused:
            self._dismiss(visitor, acceptor.refused)

    def _dismiss(self, visitor: _Visitor, why: str) -> None:
        logger.debug("closed a connection: %s", why)
        self._forget(visitor)
        visitor.sock.close()

    def _forget(self, visitor: _Visitor) -> None:
        if visitor in self._visitors:
            self._visitors.discard(visitor)
            self._selector.unregister(visitor.sock)

    def _park(self, visitor: _Visitor, hello: Hello) -> None:
        self._forget(visitor)
        key = Key(hello.group, hello.lane, hello.sender)
        with self._arrived:
            old = self._parked.pop(key, None)
            self._parked[key] = _Parked(hello.epoch, visitor.sock)
            self._arrived.notify_all()
            callback = self._subscribers.get((hello.group, hello.lane))
            if callback is not None:
                callback()
        if old is not None:
            old.sock.close()

    # --- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop listening, and close what nobody took."""
        self._wake.set("closed")
        self._thread.join()
        for visitor in list(self._visitors):
            self._dismiss(visitor, "the listener closes")
        self.discard(lambda _key, _epoch: True)
        self._selector.close()
        for door in self._doors():
            door.close()
        self._wake.close()

    def close_in_child(self) -> None:
        """Close this process's copies of the sockets, in a process that was forked from it."""
        for visitor in list(self._visitors):
            visitor.sock.close()
        for parked in list(self._parked.values()):
            parked.sock.close()
        for door in self._doors():
            door.close()
        self._selector.close()
