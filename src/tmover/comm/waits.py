"""For whom this rank waits, and for whom it has waited: read off its links at any time."""

from __future__ import annotations

from typing import NamedTuple

from tmover.comm.world import Peer, World


class Wait(NamedTuple):
    """One rank, as somebody who waits for it sees it."""

    is_awaited: bool
    """Whether it is waited for now."""
    waited_s: float
    """How long it was waited for, in all, since its links were opened."""


def waits(world: World) -> dict[int, Wait]:
    """Return how it is with every other rank of a world."""
    return {rank: _wait(peer) for rank, peer in list(world.peers.items())}


def _wait(peer: Peer) -> Wait:
    links = list(peer.lanes.values())
    return Wait(
        peer.awaited > 0 or any(link.is_awaited for link in links),
        peer.waited_s + sum(link.waited_s for link in links),
    )
