"""A world: the processes that hold the ranks of one epoch, and the links to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

from tmover.comm.frame import Kind, Op, Stamp
from tmover.comm.latch import Latch
from tmover.comm.link import Link
from tmover.comm.mesh import Mesh
from tmover.core.events import Member, Plan
from tmover.errors import LinkError


class Lane(NamedTuple):
    """What a link is used for: a group, and a way of using it."""

    group: str
    use: str


CONTROL = Lane("", "control")
"""Revocation and farewells; one thread listens on all of them."""
VOTE = Lane("", "vote")
"""Votes and commit barriers, of the whole world."""
STATE = Lane("", "state")
WORLD = ""
"""The name of the mesh of votes; the others are named after their groups."""


def message_lanes(group: str) -> tuple[Lane, Lane]:
    """Return the lanes of a group's messages: as they are sent, and as they are received.

    On the wire both are the first: each link carries messages one way, from who dialed it.
    """
    return Lane(group, "message"), Lane(group, "received")


def data_lane(group: str) -> Lane:
    """Return the lane of a group's collectives."""
    return Lane(group, "data")


class Running(Protocol):
    """A process group that may have collectives under way."""

    ranks: tuple[int, ...]

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; return whether that is so."""

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

    def close(self) -> None:
        """Close all links."""
        for link in list(self.lanes.values()):
            link.close()


class Wanted(NamedTuple):
    """A link to be opened."""

    peer: Peer
    lane: Lane


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

    def populate(self, reusable: Mapping[str, Peer], uid: str) -> None:
        """Find the peers: those in `reusable` that hold ranks here, fresh ones for the others."""
        if self.rank is None:
            return
        for member in self.plan.members:
            if member.worker == uid:
                continue
            peer = reusable.get(member.worker)
            if peer is None:
                peer = Peer(member, self.epoch)
                self.fresh.append(peer)
            self.peers[member.rank] = peer

    def holds(self, peer: Peer) -> bool:
        """Return whether the peer, over these very links, is part of this world."""
        return any(peer is own for own in list(self.peers.values()))

    def wanted(self, groups: Mapping[str, Running]) -> Iterator[Wanted]:
        """Return the links to fresh peers that this world and these groups need.

        The control link comes last: once it is there, all that the peer has dialed is.
        """
        for rank, peer in self.peers.items():
            if any(peer is fresh for fresh in self.fresh):
                for name, group in groups.items():
                    if rank in group.ranks and self.rank in group.ranks:
                        yield Wanted(peer, data_lane(name))
                yield Wanted(peer, VOTE)
                yield Wanted(peer, CONTROL)

    def lacking(self, name: str, group: Running) -> list[Wanted]:
        """Return the links that the group's mesh still lacks."""
        lane = data_lane(name)
        peers = [self.peers[rank] for rank in group.ranks if rank != self.rank]
        return [Wanted(peer, lane) for peer in peers if lane not in peer.lanes]

    def bind(self, groups: Mapping[str, Running]) -> None:
        """Bind links to ranks: one mesh for votes, and one per group whose links are all there."""
        self._make(WORLD, VOTE, tuple(range(len(self.plan.members))))
        for name, group in groups.items():
            if self.rank in group.ranks and not self.lacking(name, group):
                self.bind_group(name, group)

    def bind_group(self, name: str, group: Running) -> Mesh:
        """Bind the links of one group, all of which are there."""
        return self._make(name, data_lane(name), group.ranks)

    def _make(self, name: str, lane: Lane, ranks: tuple[int, ...]) -> Mesh:
        others = {place: rank for place, rank in enumerate(ranks) if rank != self.rank}
        mesh = self.meshes[name] = Mesh(
            epoch=self.epoch,
            rank=next(place for place in range(len(ranks)) if place not in others),
            links={place: self.peers[rank].lanes[lane] for place, rank in others.items()},
            latch=self.latch,
            burnt=self.burnt,
            timeout_s=self._timeout_s,
        )
        return mesh

    def revoke(self, reason: str) -> None:
        """Wake everybody who waits for something of this world."""
        self.latch.set(reason)
