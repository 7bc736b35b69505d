"""What a swap does to a stayer's links."""

from __future__ import annotations

from typing import NamedTuple

from tmover.comm.fabric import Fabric
from tmover.comm.world import Lane, Peer, World, message_lanes


class Change(NamedTuple):
    """What was exchanged in a stayer when it had entered the next world."""

    kept: bool
    """Whether the peers that stayed are the same objects, with the same links."""
    opened: int
    """How many links were opened."""
    before: frozenset[Lane]
    """What this process had opened to the leaver, or both ends had."""
    after: frozenset[Lane]
    """What there is to the joiner."""


class Look:
    """A stayer's links before a swap of `rank`."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        world = fabric.present()
        self._rank = rank
        self._opened = fabric.links_opened
        self._peers = dict(world.peers)
        self._links = {rank: dict(peer.lanes) for rank, peer in world.peers.items()}

    def compare(self, fabric: Fabric) -> Change:
        """Return what is different now."""
        peers = fabric.present().peers
        leaver = self._peers.get(self._rank)
        return Change(
            kept=all(
                peers[rank] is peer and peer.lanes == self._links[rank]
                for rank, peer in self._peers.items()
                if rank != self._rank
            ),
            opened=fabric.links_opened - self._opened,
            before=frozenset(filter(_is_foreseen, _lanes(leaver))) if leaver else frozenset(),
            after=_lanes(peers[self._rank]),
        )


def lanes_of(world: World) -> dict[int, frozenset[Lane]]:
    """Return the lanes to each other rank."""
    return {rank: _lanes(peer) for rank, peer in world.peers.items()}


def _lanes(peer: Peer) -> frozenset[Lane]:
    return frozenset(peer.lanes) | frozenset(peer.ahead)


def _is_foreseen(lane: Lane) -> bool:
    """Return whether this end opens it: the sender opens the link of messages."""
    return lane != message_lanes(lane.group)[1]
