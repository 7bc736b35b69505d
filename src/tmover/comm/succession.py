"""Which world is present, which one is to come, and what is left of those before.

Bookkeeping without I/O: nothing here opens, closes, sends or wakes anything. `lock` is held by
whoever does more than one thing with it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tmover.comm.link import Link
from tmover.comm.watch import Loss
from tmover.comm.world import Peer, World
from tmover.core.events import Plan
from tmover.errors import Interrupted


class Remains(NamedTuple):
    """What is left of worlds that are over."""

    peers: list[Peer]
    worlds: list[World]


class Succession:
    """The worlds of one process. An epoch number is entered once, or burnt, and never again."""

    def __init__(self, uid: str, *, timeout_s: float) -> None:
        self.lock = threading.RLock()
        self.present: World | None = None
        self.coming: World | None = None
        """The world that is being prepared, or is."""
        self._uid = uid
        self._timeout_s = timeout_s
        self._crossing = False
        """Whether this process stands in the barrier of the coming world."""
        self._deferred: list[Loss] = []
        self._remains = Remains([], [])
        self._burnt: set[int] = set()

    @property
    def epoch(self) -> int:
        """The epoch of the present world; 0 before the first."""
        return self.present.epoch if self.present is not None else 0

    def is_over(self, epoch: int) -> bool:
        """Return whether an epoch can never be entered any more: one comes that is later."""
        return epoch == self.epoch or self.is_past(epoch)

    def is_past(self, epoch: int) -> bool:
        """Return whether nothing may be opened for an epoch any more."""
        coming = self.coming
        skipped = coming is not None and self.epoch < epoch < coming.epoch
        return skipped or epoch < self.epoch or epoch in self._burnt

    def all(self) -> list[World]:
        """Return the present and the coming world."""
        return [world for world in (self.present, self.coming) if world is not None]

    def of(self, epoch: int) -> World | None:
        """Return the present or coming world of this epoch."""
        return next((world for world in self.all() if world.epoch == epoch), None)

    def peers(self) -> list[Peer]:
        """Return the peers of the present world."""
        return list(self.present.peers.values()) if self.present is not None else []

    def everybody(self) -> list[Peer]:
        """Return all peers there still are links to."""
        return [p for world in self.all() for p in world.peers.values()] + self._remains.peers

    def since(self) -> dict[str, int]:
        """Return since which epoch links to each process are in use here."""
        peers = sorted(self.everybody(), key=lambda peer: -peer.since)
        return {peer.uid: peer.since for peer in peers}

    def forget(self, group: str) -> list[Link]:
        """Forget a group that is destroyed; return the links it had."""
        for world in self.all():
            world.meshes.pop(group, None)
        return [link for peer in self.everybody() for link in peer.forget(group)]

    # --- one world after the other ----------------------------------------------------------------

    def begin(self, plan: Plan, afresh: Collection[str]) -> World | None:
        """Return the coming world, to be made ready; None if it is. Raises `Interrupted` if over.

        Peers are reused, except those in `afresh`; also a leaver's, if it was not released yet.
        """
        with self.lock:
            if self.coming is not None and self.coming.epoch == plan.epoch and self.coming.ready:
                return None
            if self.is_over(plan.epoch):
                msg = f"epoch {plan.epoch} is over"
                raise Interrupted(msg)
            known = (*self._remains.peers, *self.peers())
            usable = {p.uid: p for p in known if not p.lost and p.uid not in afresh}
            world = World(plan, self._uid, burnt=self._burnt, timeout_s=self._timeout_s)
            world.populate(usable, self._uid, self.present)
            self.coming = world
            return world

    def make_ready(self, world: World) -> None:
        """Note that all its links are open. Raises `Interrupted` if it was given up meanwhile."""
        with self.lock:
            if world.latch.is_set:
                raise Interrupted(world.latch.reason)
            world.ready = True

    def ready(self, epoch: int) -> World | None:
        """Return the coming world of this epoch, if it is ready."""
        world = self.coming
        return world if world is not None and world.epoch == epoch and world.ready else None

    def cross(self, epoch: int) -> World | None:
        """Return the coming world, whose barrier this process enters; None if it is not ready."""
        with self.lock:
            world = self.ready(epoch)
            self._crossing = world is not None
            return world

    def advance(self, world: World) -> World | None:
        """Make the coming world the present one; return the one before."""
        with self.lock:
            before = self.present
            self.present, self.coming, self._crossing = world, None, False
            self._deferred.clear()
            if before is not None:
                peers = (*self._remains.peers, *before.peers.values())
                kept = {id(peer) for peer in world.peers.values()}
                self._remains.peers[:] = [peer for peer in peers if id(peer) not in kept]
                self._remains.worlds.append(before)
            return before

    def give_up(self, epoch: int) -> World | None:
        """Burn an epoch, and return its world if there is one. Not the present one's.

        Nothing here holds the world any more: it goes with the last thread that waits in it.
        """
        with self.lock:
            if epoch <= self.epoch:
                return None
            self._burnt.add(epoch)
            world = self.coming
            if world is None or world.epoch != epoch:
                return None
            self.coming, self._crossing = None, False
            return world

    def take_remains(self) -> Remains:
        """Return what nobody needs any more, and forget it. A leaver may be in the coming world."""
        with self.lock:
            peers, worlds = self._remains
            coming = self.coming
            kept = [peer for peer in peers if coming is not None and coming.holds(peer)]
            self._remains = Remains(kept, [])
            return Remains([peer for peer in peers if peer not in kept], worlds)

    # --- broken links -----------------------------------------------------------------------------

    def lose(self, losses: Sequence[Loss]) -> dict[int, list[Loss]]:
        """Note that peers are lost; return what each world loses by it, by epoch.

        In a barrier only the peers of its world count; the others do if it is given up.
        """
        with self.lock:
            seen: dict[int, list[Loss]] = {}
            coming = self.coming if self._crossing else None
            for loss in losses:
                loss.peer.lost = loss.reason
                if coming is not None and not coming.holds(loss.peer):
                    self._deferred.append(loss)
                    continue
                for world in (self.present, coming):
                    if world is not None and world.holds(loss.peer) and not loss.peer.left:
                        seen.setdefault(world.epoch, []).append(loss)
            return seen

    def take_deferred(self) -> list[Loss]:
        """Return the losses that were not looked at in a barrier, and forget them."""
        with self.lock:
            deferred, self._deferred = self._deferred, []
            return deferred

    def lost_since(self, world: World) -> list[Loss]:
        """Return the peers of a world that were lost before it was entered."""
        return [Loss(peer, peer.lost) for peer in world.peers.values() if peer.lost]
