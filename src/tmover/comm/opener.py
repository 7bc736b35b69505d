"""Opens links between two processes: of each pair the larger uid dials, the other one waits."""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tmover.comm.dial import Conversation, converse, introduce
from tmover.comm.handshake import Hello
from tmover.comm.latch import Latch
from tmover.comm.link import Link, tune
from tmover.comm.listener import Key, Listener
from tmover.comm.timeouts import Timeouts
from tmover.comm.world import CONTROL, DATA, Lane, Peer, Wanted
from tmover.errors import LinkError


class Identity(NamedTuple):
    """Who this process is."""

    job: str
    secret: bytes
    uid: str
    address: str


def hello_to(uid: str, lane: Lane, epoch: int, own: Identity) -> Hello:
    """Return what a process says when it dials `uid`."""
    return Hello(
        job=own.job,
        epoch=epoch,
        group=lane.group,
        lane=lane.use,
        sender=own.uid,
        receiver=uid,
    )


class Opener:
    """Opens links for one process, and counts them."""

    def __init__(
        self, identity: Identity, listener: Listener, timeouts: Timeouts, *, nearby: bool
    ) -> None:
        self._identity = identity
        self._listener = listener
        self._timeouts = timeouts
        self._nearby = nearby
        self.opened = 0
        self.links: weakref.WeakSet[Link] = weakref.WeakSet()
        """All that are in anybody's hands."""

    def open_all(
        self, wanted: Iterable[Wanted], *, epoch: int, latch: Latch, timeout_s: float
    ) -> None:
        """Open links that both ends need now: first those this process dials, to all at once.

        What was dialed ahead by either end is used. What was opened stays in its peer's `lanes`.
        Raises one `LinkError` that names every peer that could not be reached, and none that
        another one kept waiting.
        """
        missing = [want for want in wanted if not self._find(want)]
        self._open([], missing, epoch=epoch, latch=latch, timeout_s=timeout_s)

    def open_ahead(
        self,
        foreseen: Iterable[Wanted],
        needed: Iterable[Wanted],
        *,
        epoch: int,
        latch: Latch,
        timeout_s: float,
    ) -> None:
        """Open what is needed, and dial what this process foresees that it will need.

        The peer may not foresee it: a joiner has not used anything yet. So it is this process that
        dials, and what becomes of it is seen when both ends need it.
        """
        self._open(foreseen, needed, epoch=epoch, latch=latch, timeout_s=timeout_s)

    def _open(
        self,
        foreseen: Iterable[Wanted],
        needed: Iterable[Wanted],
        *,
        epoch: int,
        latch: Latch,
        timeout_s: float,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        dialed: dict[str, list[Wanted]] = {}
        awaited: list[Wanted] = []
        for want in foreseen:
            dialed.setdefault(want.peer.uid, []).append(want)
        for want in needed:
            own = self._dials(want.peer)
            (dialed.setdefault(want.peer.uid, []) if own else awaited).append(want)
        dialing = [self._dial_in_turn(wants, epoch=epoch) for wants in dialed.values()]
        errors = converse(dialing, latch=latch, deadline=deadline)
        for want in awaited:
            if any(want.peer.uid in error.peers for error in errors):
                continue
            try:
                self._await(want, latch=latch, deadline=deadline)
            except LinkError as error:
                errors.append(error.with_traceback(None))  # it would hold the latch till `gc` comes
        if errors:
            raise _joined(errors)

    def _find(self, want: Wanted) -> Link | None:
        """Return what was dialed ahead, if it was: by the greater uid if by both."""
        peer, lane = want
        ahead = peer.ahead.pop(lane, None)
        link = self.pick_up(want, lane)
        if link is None and ahead is not None:
            peer.lanes[lane] = ahead
        elif ahead is not None:
            ahead.close()
        return link or ahead

    def pick_up(self, want: Wanted, lane: Lane) -> Link | None:
        """Take a link that has arrived for `lane`, if it has, and keep it as what is wanted."""
        key = Key(lane.group, lane.use, want.peer.uid)
        sock = self._listener.glance(key, since=want.peer.since)
        return None if sock is None else self._accept(sock, want)

    def _await(self, want: Wanted, *, latch: Latch, deadline: float) -> Link:
        peer, lane = want
        key = Key(lane.group, lane.use, peer.uid)
        sock = self._listener.take(key, since=peer.since, latch=latch, deadline=deadline)
        return self._accept(sock, want)

    def _accept(self, sock: socket.socket, want: Wanted) -> Link:
        link = self._adopt(sock, want, want.peer.lanes)
        link.is_accepted = True
        return link

    def dial(self, want: Wanted, *, epoch: int, latch: Latch, deadline: float) -> Link:
        """Open one link by dialing, whichever uid is the larger."""
        dialing = [self._dial_in_turn([want], epoch=epoch)]
        errors = converse(dialing, latch=latch, deadline=deadline)
        if errors:
            raise errors.pop()
        return want.peer.lanes[want.lane]

    def _dial_in_turn(self, wants: Sequence[Wanted], *, epoch: int) -> Conversation[None]:
        """Open links to one peer, one after the other."""
        own = self._identity
        for want in wants:
            peer, lane = want
            hello = hello_to(peer.uid, lane, epoch, own)
            sock = yield from introduce(
                peer.endpoint,
                hello,
                secret=own.secret,
                source=own.address,
                near=self._nearby and lane != CONTROL,
            )
            self._adopt(sock, want, peer.lanes if self._keeps(want) else peer.ahead)

    def _keeps(self, want: Wanted) -> bool:
        """Return whether a link this process has dialed is certain to be used at both ends."""
        return self._dials(want.peer) or want.lane.use != DATA

    def _adopt(self, sock: socket.socket, want: Wanted, lanes: dict[Lane, Link]) -> Link:
        """Make a link of a connection that has passed its handshake.

        Only the control lane, which is always read, tells a peer that is gone by what it does not
        acknowledge; there is one to every peer.
        """
        unacked_s = self._timeouts.unacked_s if want.lane == CONTROL else 0.0
        tune(sock, self._timeouts, unacked_s=unacked_s)
        link = Link(sock, want.peer.uid)
        lanes[want.lane] = link
        self.opened += 1
        self.links.add(link)
        return link

    def _dials(self, peer: Peer) -> bool:
        return self._identity.uid > peer.uid


def _joined(errors: Sequence[LinkError]) -> LinkError:
    peers = tuple(sorted({peer for error in errors for peer in error.peers}))
    return LinkError("; ".join(str(error) for error in errors), peers)
