"""The fabric: every link of one process, and which world they make up at the moment.

A world is prepared beside the running one, and `commit` exchanges a pointer. Surviving links are
shared by both worlds; every frame bears the number of its epoch, so what one world left behind in a
link means nothing to the next.
"""

from __future__ import annotations

import functools
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tmover.comm import lifetime
from tmover.comm.frame import Header, Kind
from tmover.comm.generation import generation_of
from tmover.comm.handshake import refusal
from tmover.comm.mesh import Mesh
from tmover.comm.mode import Mode as Mode
from tmover.comm.mode import Rehearsal
from tmover.comm.opener import Identity
from tmover.comm.sandbox import Witness
from tmover.comm.settling import settle
from tmover.comm.succession import Succession
from tmover.comm.timeouts import Timeouts
from tmover.comm.watch import Loss
from tmover.comm.wiring import Wiring
from tmover.comm.world import WORLD, Peer, Running, World
from tmover.core.events import Plan
from tmover.errors import ConfigError, Interrupted, LinkError, StateError, TmoverError

logger = logging.getLogger(__name__)

_LEAVING = "this process leaves"
OnBroken = Callable[[int, tuple[str, ...], str], None]


class Fabric:
    """See the module. One per process; every method may be called from any thread.

    `nearby`: ranks of one host may speak over Unix sockets. `fabric`: what carries collectives.
    """

    def __init__(
        self,
        *,
        job: str,
        secret: bytes,
        uid: str,
        address: str,
        timeouts: Timeouts | None = None,
        nearby: bool = True,
        fabric: str = "links",
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self.mode = Mode.SANDBOX
        self.attempt_open = False
        """Whether results are thrown away if the world is revoked now; set by the session."""
        self.refusal = ""
        """Why no collective may be made now, "" if one may; set by the session."""
        self.caution = ""
        """What to say, once, if one is made now; set by the session."""
        self.witness: Witness | None = None
        """Who notes what is put into collectives that are answered here, if anybody does."""
        self.fault: Exception | None = None  # where nobody could be told: who comes next is
        self.on_broken: OnBroken | None = None
        self.on_halfway: Callable[[Kind], None] | None = None
        """Called inside a vote or a barrier, when one peer was told and the others were not."""
        self.rehearsal: Rehearsal | None = None
        self.groups: dict[str, Running] = {}
        """By their names among processes."""
        self._identity = Identity(job, secret, uid, address)
        self._rehearsed: tuple[int, int] | None = None
        self._preparing = threading.Lock()
        self.worlds = Succession(uid, timeout_s=self.timeouts.collective_s)
        self._accused: set[int] = set()
        self._closed = False
        self.wiring = Wiring(
            self._identity,
            self.timeouts,
            nearby=nearby,
            check=lambda hello: refusal(hello, job, uid, self.worlds.is_past),
            on_word=self._on_word,
            on_lost=self._on_lost,
            on_failure=self._on_deaf,
        )
        self.generation = generation_of(fabric, address, self.wiring, self.timeouts)
        lifetime.begin(self)

    # --- what it is -------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the present world; 0 before the first."""
        return self.worlds.epoch

    @property
    def endpoint(self) -> str:
        """Where other processes find this one."""
        return self.wiring.endpoint

    @property
    def links_opened(self) -> int:
        """How many links were opened so far."""
        return self.wiring.opened

    @property
    def rank(self) -> int:
        """The rank this process holds or rehearses. Raises `ConfigError` before it has one."""
        return self._place()[0]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._place()[1]

    def _place(self) -> tuple[int, int]:
        world = self.worlds.present
        if world is not None and world.rank is not None:
            return world.rank, len(world.plan.members)
        if self._rehearsed is None:
            msg = "this process has no rank yet: neither rehearsed nor part of a world"
            raise ConfigError(msg)
        return self._rehearsed

    def rehearse(self, rank: int, world_size: int) -> None:
        """Act as `rank` without any peer."""
        self._rehearsed = (rank, world_size)

    # --- worlds -----------------------------------------------------------------------------------

    def form(self, plan: Plan, *, timeout_s: float) -> None:
        """Enter the first world."""
        self.prepare(plan, timeout_s=timeout_s)
        self.commit(plan.epoch)

    def prepare(
        self, plan: Plan, *, timeout_s: float, relink: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Open what `plan` needs beside what exists, and park it. Collectives may go on meanwhile.

        Links to processes of the present world are reused, except those of the pairs in `relink`.
        Raises `LinkError` naming the peers that could not be reached, `Interrupted` if the epoch is
        revoked or rolled back meanwhile. Whatever was prepared before is rolled back.
        """
        uid = self._identity.uid
        afresh = {other for pair in relink if uid in pair for other in pair}
        self._supersede(plan.epoch)
        with self._preparing:
            self._supersede(plan.epoch)
            if self._closed:
                raise Interrupted(_LEAVING)
            world = self.worlds.begin(plan, afresh)
            if world is None:
                return
            try:
                self.wiring.open(world, set(self.groups), timeout_s=timeout_s)
                self.generation.prepare(world, self.worlds.present, self.groups, timeout_s)
                if world.rank is not None:
                    world.bind_votes()
                self.worlds.make_ready(world)
            except BaseException:
                self.rollback(plan.epoch)
                self.wiring.drop(world.fresh, epoch=self.epoch)
                raise

    def _supersede(self, epoch: int) -> None:
        """Give up what was prepared for an epoch before this one."""
        coming = self.worlds.coming
        if coming is not None and coming.epoch < epoch:
            self.rollback(coming.epoch)

    def barrier(self, epoch: int, payload: bytes = b"") -> list[bytes]:
        """Return once every rank of the prepared world stands here; with what each has sent.

        Raises `LinkError` if a link of that world breaks first, `Interrupted` if it is revoked.
        What becomes of links outside of that world is looked at later.
        """
        self._raise_fault()
        world = self.worlds.cross(epoch)
        if world is None:
            msg = f"epoch {epoch} is not prepared"
            raise Interrupted(msg)
        self._on_lost(self.worlds.lost_since(world))  # while it was prepared nobody minded
        return self._hear_all(world, Kind.BARRIER, payload)

    def commit(self, epoch: int) -> None:
        """Let every group speak in the prepared world from now on."""
        with self.worlds.lock:
            world = self.worlds.ready(epoch)
            if world is None:
                msg = f"epoch {epoch} is not prepared"
                raise StateError(msg)
            before = self.worlds.advance(world)
            self.generation.commit(world, before)
            self._rehearsed = None
            self.mode = Mode.REVOKED if world.latch.is_set else Mode.LIVE
        if before is not None:
            before.revoke(f"epoch {before.epoch} is over")
        self.wiring.end_handoffs_before(epoch, f"epoch {epoch} has begun")
        self._on_lost(self.worlds.lost_since(world))

    def rollback(self, epoch: int) -> None:
        """Close what was prepared for `epoch`; the world before is as it was."""
        reason = f"epoch {epoch} was given up"
        if epoch > self.epoch:
            self.wiring.end_handoffs(epoch, reason)
        with self.worlds.lock:  # it is ready before this, or never
            world = self.worlds.give_up(epoch)
            if world is None:
                return
            world.revoke(reason)
        self.wiring.wake()
        self.generation.give_up(epoch, reason)
        if world.ready:
            self.wiring.drop(world.fresh, epoch=self.epoch)
        fresh = {peer.uid for peer in world.fresh}  # of the others, who is in it may use a link
        self.wiring.discard(lambda uid, since: since == epoch and uid in fresh)
        self._on_lost(self.worlds.take_deferred())

    def release(self, epoch: int) -> None:
        """Close the links that the world of `epoch` does not use any more."""
        if epoch != self.epoch:
            return
        remains = self.worlds.take_remains()
        self.generation.release()
        self.wiring.drop(remains.peers, epoch=epoch)
        for world in remains.worlds:
            world.latch.close()
        kept = self.worlds.since()
        self.wiring.discard(lambda uid, since: since < kept.get(uid, epoch))

    # --- revocation -------------------------------------------------------------------------------

    def revoke(self, epoch: int, reason: str) -> None:
        """Let nothing of `epoch` pass here any more; wake who waits, and tell every peer.

        Of an epoch that is neither present nor prepared only hand-offs end; twice is harmless.
        """
        self.wiring.end_handoffs(epoch, reason)  # a leaver has no world of the epoch
        with self.worlds.lock:
            world = self.worlds.of(epoch)
            if world is None or world.latch.is_set:
                return
            if world is self.worlds.present:
                self.mode = Mode.REVOKED  # before anybody wakes
            world.revoke(reason)
            peers = list(world.peers.values())
        self.wiring.wake()
        for peer in peers:
            peer.say(Kind.REVOKE, epoch)
        self.generation.abort(epoch, reason)

    def observe(self, epoch: int, peers: tuple[str, ...], reason: str) -> None:
        """Take note that this process itself has seen links break: revoke, and accuse once."""
        with self.worlds.lock:
            if self._closed or self.worlds.of(epoch) is None:
                return
            first = epoch not in self._accused
            self._accused.add(epoch)
        self.revoke(epoch, reason)
        if first and self.on_broken is not None:
            self.on_broken(epoch, peers, reason)

    def _on_word(self, peer: Peer, head: Header) -> None:
        if head.kind == Kind.BYE:
            peer.left = True
        elif head.kind == Kind.REVOKE:
            self.revoke(head.epoch, f"{peer.uid} says that it is revoked")

    def _on_lost(self, losses: Sequence[Loss]) -> None:
        """Take note of control links that broke, in each world that they belong to."""
        with self.worlds.lock:
            seen = {} if self._closed else self.worlds.lose(losses)
        for epoch, lost in seen.items():
            peers = tuple(sorted(loss.peer.uid for loss in lost))
            self.observe(epoch, peers, "; ".join(loss.reason for loss in lost))

    def _on_deaf(self, error: Exception) -> None:
        """Break every world: a rank that does not hear `REVOKE` would go on in one that is over."""
        logger.error("the thread that hears the peers failed: %r", error, exc_info=error)
        self.fault = TmoverError(f"this rank cannot hear its peers any more: {error!r}")
        for world in self.worlds.all():
            self.revoke(world.epoch, str(self.fault))

    def _raise_fault(self) -> None:
        if self.fault is not None:
            raise self.fault

    # --- votes and collectives --------------------------------------------------------------------

    def exchange(self, payload: bytes) -> list[bytes]:
        """Send `payload` to every rank; return what each sent.

        Raises `LinkError` if a link breaks, `Interrupted` if the world is revoked first.
        """
        self._raise_fault()
        if self.mode is Mode.SANDBOX:
            return [payload] * self.world_size
        return self._hear_all(self.present(), Kind.VOTE, payload)

    def _hear_all(self, world: World, kind: Kind, payload: bytes) -> list[bytes]:
        barrier = kind is Kind.BARRIER
        timeout_s = self.timeouts.barrier_s if barrier else self.timeouts.collective_s
        hook = self.on_halfway
        halfway = None if hook is None else functools.partial(hook, kind)
        with self._over_votes(world) as mesh:
            return mesh.everybody(kind, payload, timeout_s, halfway=halfway)

    @contextmanager
    def _over_votes(self, world: World) -> Iterator[Mesh]:
        """Use the mesh of votes; what breaks it, breaks the world."""
        try:
            yield world.meshes[WORLD]
        except LinkError as error:
            self.observe(world.epoch, error.peers, str(error))
            raise
        except Interrupted as error:
            self.revoke(world.epoch, str(error))
            raise

    def hand_on(self, payload: bytes, *, to: int, source: int, epoch: int | None = None) -> bytes:
        """Send `payload` to rank `to`; return what rank `source` has sent here in the same way.

        In the present world, or in the prepared one of `epoch`; every rank of that world does it.
        Raises as `exchange` and `barrier` do.
        """
        world = self.present() if epoch is None else self.worlds.ready(epoch)
        if world is None:
            msg = f"epoch {epoch} is not prepared"
            raise Interrupted(msg)
        timeout_s = self.timeouts.collective_s if epoch is None else self.timeouts.barrier_s
        with self._over_votes(world) as mesh:
            return mesh.hand_on(payload, to=to, source=source, timeout_s=timeout_s)

    def present(self) -> World:
        """Return the present world. Raises `Interrupted` if it is revoked."""
        world = self.worlds.present
        if world is None or world.latch.is_set:
            raise Interrupted(world.latch.reason if world else "this process is in no world")
        return world

    def mesh(self, world: World, name: str) -> Mesh:
        """Return the mesh of a group, which opens links as it needs them."""
        mesh = world.meshes.get(name)
        return mesh or world.bind_group(name, self.groups[name].ranks, self.wiring.complete)

    def quiesce(self) -> None:
        """Wait until no collective of this process is under way; if revoked, they end at once."""
        self._raise_fault()
        settle(dict(self.groups), self.worlds.present, self.timeouts)

    # --- state ------------------------------------------------------------------------------------

    def connect_state(
        self, uid: str, endpoint: str, *, epoch: int, timeout_s: float
    ) -> socket.socket:
        """Return a blocking socket over which to hand state to `uid`, as long as `epoch` may be."""
        return self.wiring.connect_state(uid, endpoint, epoch=epoch, timeout_s=timeout_s)

    def accept_state(self, uid: str, *, epoch: int, timeout_s: float) -> socket.socket:
        """Return the other end of `connect_state`. Raises `TimeoutError`, a `LinkError` too."""
        return self.wiring.accept_state(uid, epoch=epoch, timeout_s=timeout_s)

    # --- ending -----------------------------------------------------------------------------------

    def close(self, *, bye: bool) -> None:
        """End every thread and close every socket. `bye`: peers need not wonder what happened."""
        with self.worlds.lock:
            if self._closed:
                return
            self._closed = True
            if self.mode is Mode.LIVE:
                self.mode = Mode.REVOKED
        for peer in self.worlds.everybody() if bye else ():
            peer.say(Kind.BYE, self.epoch)
        for world in self.worlds.all():
            world.revoke(_LEAVING)
        self.wiring.end_handoffs_before(math.inf, _LEAVING)
        self.generation.close(_LEAVING)
        for group in list(self.groups.values()):
            group.close()
        with self._preparing:
            self.wiring.close()
            for world in [*self.worlds.all(), *self.worlds.take_remains().worlds]:
                world.latch.close()
        lifetime.end(self)

    def disown(self) -> None:
        """Close the copies of all sockets in a process forked from this one, and touch no more.

        Otherwise a dead rank's links would stay open in the workers of its data loader.
        """
        self._closed = True
        self.generation.disown()
        self.wiring.close_in_child()
