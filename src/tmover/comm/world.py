"""A world: the processes that hold the ranks of one epoch, and the links to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tmover.comm.frame import Kind, Op, Stamp
from tmover.comm.latch import Latch
from tmover.comm.link import Link
from tmover.comm.mesh import Mesh
from tmover.core.events import Member, Plan
from tmover.errors import LinkError, StateError


class Lane(NamedTuple):
    """What a link is used for: a group, and a way of using it."""

    group: str
    use: str


CONTROL = Lane("", "control")
"""Revocation and farewells; one thread listens on all of them."""
VOTE = Lane("", "vote")
"""Votes and commit barriers, of the whole world."""
STATE = Lane("", "state")
COPIES = Lane("", "copies")
RENDEZVOUS = Lane("", "rendezvous")
"""Where the ends of a new communicator find each other."""
DATA = "data"
_MESSAGE, _RECEIVED = "message", "received"
WORLD = ""
"""The name of the mesh of votes; the others are named after their groups."""


def message_lanes(group: str) -> tuple[Lane, Lane]:
    """Return the lanes of a group's messages: as they are sent, and as they are received.

    On the wire both are the first: each link carries messages one way, from who dialed it.
    """
    return Lane(group, _MESSAGE), Lane(group, _RECEIVED)


def data_lane(group: str) -> Lane:
    """Return the lane of a group's collectives."""
    return Lane(group, DATA)


class Running(Protocol):
    """A process group that may have collectives under way."""

    ranks: tuple[int, ...]
    timeout_s: float

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; return whether that is so."""

    def settle_messages(self, timeout_s: float) -> bool:
        """Wait until no message over links is under way; return whether that is so."""

    def stray(self, ended: Collection[int]) -> str:
        """Return a message under way of which no end is with any but these ranks, "" if none."""

    def close(self) -> None:
        """End its threads."""


class Peer:
    """Another process, since the epoch in which it was connected to, and the links to it.

    A process that is connected to afresh (`relink`) is another peer.
    """

    def __init__(self, member: Member, since: int) -> None:
        self.uid = member.worker
        self.endpoint = member.endpoint
        self.since = since
        self.lanes: dict[Lane, Link] = {}
        self.ahead: dict[Lane, Link] = {}
        """Links that were dialed before anybody needed them: used if the other end has none."""
        self.foreseen: tuple[Lane, ...] = ()
        """What groups will need here, as far as this process can know."""
        self.lost = ""
        """Why its links cannot be used any more."""
        self.left = False
        """Whether it has said farewell."""
        self.awaited = 0
        """How many threads wait for a message to or from it to be through."""
        self.waited_s = 0.0
        """How long was waited, in all, for messages from it."""
        self._speaking = threading.Lock()

    def say(self, kind: Kind, epoch: int) -> None:
        """Say something on the control link, if it still works. Never blocks."""
        control = self.lanes.get(CONTROL)
        if control is None:
            return
        head = Stamp(kind, Op.NONE, 0, epoch, 0, 0).head(0)
        with self._speaking, contextlib.suppress(LinkError):
            if control.flush():
                control.put(head)

    def used(self) -> Iterator[Lane]:
        """Return the lanes of groups that this process has used, or opened to use them."""
        for lane in {**self.lanes, **self.ahead}:
            if lane.group and lane.use != _RECEIVED:
                yield lane

    def bury(self, lane: Lane) -> None:
        """Close a link that its dialer has none of, and will dial again."""
        link = self.lanes.get(lane)
        if link is not None and link.is_stillborn:
            del self.lanes[lane]
            link.close()

    def forget(self, group: str) -> list[Link]:
        """Forget the links of a group, and return them."""
        everything = (self.lanes, self.ahead)
        gone = [(some, lane) for some in everything for lane in list(some) if lane.group == group]
        return [some.pop(lane) for some, lane in gone]

    def close(self) -> None:
        """Close all links."""
        for link in [*self.lanes.values(), *self.ahead.values()]:
            link.close()


class Wanted(NamedTuple):
    """A link to be opened."""

    peer: Peer
    lane: Lane


class Complete(Protocol):
    """Opens links of a world that are needed now."""

    def __call__(self, wanted: Sequence[Wanted], *, epoch: int, latch: Latch) -> None:
        """Raise `LinkError` if that fails, `Interrupted` once the latch is set."""


def _none_missing(wanted: Sequence[Wanted], *, epoch: int, latch: Latch) -> None:
    msg = f"links are missing: {wanted}"
    raise StateError(msg)


class World:
    """Who holds which rank, as one process sees it; its own `rank` is None if it holds none."""

    def __init__(self, plan: Plan, uid: str, *, burnt: Collection[int], timeout_s: float) -> None:
        self.plan = plan
        self.epoch = plan.epoch
        self.rank = plan.rank_of(uid)
        self.peers: dict[int, Peer] = {}
        self.fresh: list[Peer] = []
        """Those that were connected to for this world."""
        self.meshes: dict[str, Mesh] = {}
        self.latch = Latch()
        self.ready = False
        self.burnt: Callable[[int], bool] = burnt.__contains__
        self._timeout_s = timeout_s

    def populate(self, reusable: Mapping[str, Peer], uid: str, before: World | None) -> None:
        """Find the peers: those in `reusable` that hold ranks here, fresh ones for the others.

        A fresh one will be spoken to as whoever held its rank `before` was.
        """
        if self.rank is None:
            return
        for member in self.plan.members:
            if member.worker == uid:
                continue
            peer = reusable.get(member.worker)
            if peer is None:
                peer = Peer(member, self.epoch)
                former = before.peers.get(member.rank) if before is not None else None
                if former is not None and (former.uid != peer.uid or uid > peer.uid):
                    peer.foreseen = tuple(former.used())
                self.fresh.append(peer)
            self.peers[member.rank] = peer

    @property
    def own_rank(self) -> int:
        """The rank this process holds. Raises `StateError` if it holds none."""
        if self.rank is None:
            msg = f"this process has no rank in epoch {self.epoch}"
            raise StateError(msg)
        return self.rank

    def holds(self, peer: Peer) -> bool:
        """Return whether the peer, over these very links, is part of this world."""
        return any(peer is own for own in list(self.peers.values()))

    def needed(self) -> Iterator[Wanted]:
        """Return the links to fresh peers without which this world cannot be entered."""
        for peer in self.fresh:
            yield Wanted(peer, VOTE)
            yield Wanted(peer, CONTROL)

    def foreseen(self, groups: Collection[str]) -> Iterator[Wanted]:
        """Return the links to fresh peers that these groups will need."""
        for peer in self.fresh:
            for lane in peer.foreseen:
                if lane.group in groups:
                    yield Wanted(peer, lane)

    def bind_votes(self) -> None:
        """Bind the links of votes, all of which are there, to ranks."""
        ranks = range(len(self.plan.members))
        mesh = self._make(WORLD, VOTE, ranks, _none_missing)
        mesh.need(mesh.peers)

    def bind_group(self, name: str, ranks: Sequence[int], complete: Complete) -> Mesh:
        """Bind the links of one group; `complete` opens what turns out to be missing."""
        for rank in ranks:
            if rank in self.peers:
                self.peers[rank].bury(data_lane(name))
        return self._make(name, data_lane(name), ranks, complete)

    def _make(self, name: str, lane: Lane, ranks: Sequence[int], complete: Complete) -> Mesh:
        own = ranks.index(self.rank) if self.rank is not None else 0
        everybody, epoch, latch = self.peers, self.epoch, self.latch

        def find(places: Sequence[int]) -> dict[int, Link]:  # holds no world: one ends with its use
            peers = {place: everybody[ranks[place]] for place in places}
            lacking = [Wanted(p, lane) for p in peers.values() if lane not in p.lanes]
            if lacking:
                complete(lacking, epoch=epoch, latch=latch)
            return {place: peer.lanes[lane] for place, peer in peers.items()}

        mesh = self.meshes[name] = Mesh(
            epoch=self.epoch,
            rank=own,
            size=len(ranks),
            find=find,
            latch=self.latch,
            burnt=self.burnt,
            timeout_s=self._timeout_s,
        )
        return mesh

    def revoke(self, reason: str) -> None:
        """Wake everybody who waits for something of this world."""
        self.latch.set(reason)
