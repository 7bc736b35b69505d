"""One thread that listens on all control links: who revokes, who says farewell, who is gone."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tmover.comm.frame import Header
from tmover.comm.latch import Latch
from tmover.comm.world import CONTROL, Peer
from tmover.errors import LinkError


class Loss(NamedTuple):
    """A control link that broke."""

    peer: Peer
    reason: str


class Watch:
    """Calls `on_word` for what peers say, and `on_lost` with those found broken at once.

    `on_failure` gets what ended the thread though it should not have: nobody is heard any more.
    """

    def __init__(
        self,
        *,
        on_word: Callable[[Peer, Header], None],
        on_lost: Callable[[Sequence[Loss]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._on_word = on_word
        self._on_lost = on_lost
        self._on_failure = on_failure
        self._lock = threading.Lock()
        """Held from a look at `_peers` to its end: a closed link's number may be used again."""
        self._peers: dict[int, Peer] = {}
        self._wake = Latch()
        self._epoll = select.epoll()
        self._epoll.register(self._wake.fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="tmover-watch", daemon=True)
        self._thread.start()

    def add(self, peer: Peer) -> None:
        """Listen to the peer from now on."""
        fd = peer.lanes[CONTROL].fd
        with self._lock:
            self._peers[fd] = peer
            self._epoll.register(fd, select.EPOLLIN)

    def remove(self, peer: Peer) -> None:
        """Stop listening to the peer. Must come before its links are closed.

        Two threads may do it at once: the one that was told of a leaver's end, and this one's own,
        which has seen it.
        """
        link = peer.lanes.get(CONTROL)
        with self._lock:
            if link is None or self._peers.get(link.fd) is not peer:
                return
            del self._peers[link.fd]
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(link.fd)

    def close(self) -> None:
        """End the thread."""
        self._wake.set("closed")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._epoll.close()
        self._wake.close()

    def close_in_child(self) -> None:
        """Close this process's copy of the poller, in a process that was forked from it."""
        self._epoll.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - a thread's edge: somebody must know of its end
            self._on_failure(error)

    def _serve(self) -> None:
        while not self._wake.is_set:
            lost = []
            for fd, _ in self._epoll.poll():
                peer = self._peers.get(fd)
                if peer is None:
                    continue
                try:
                    self._hear(peer)
                except LinkError as error:
                    self.remove(peer)
                    lost.append(Loss(peer, str(error)))
            if lost:
                self._on_lost(lost)

    def _hear(self, peer: Peer) -> None:
        link = peer.lanes[CONTROL]
        while True:
            head = link.next_head(ahead=False)
            if head is None:
                return
            if head.length:
                why = "what it says has no end"
                raise link.broken(why)
            link.head = None
            self._on_word(peer, head)
