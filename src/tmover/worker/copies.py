"""The copies of a job whose ranks cannot replace each other: made, sent, kept and agreed on.

After a step each rank copies what it holds (see `state.generations`) and sends that to its keepers,
beside the training, to each over a connection of its own that ends with the epoch. In every vote it
says up to which step all its keepers hold it. What all say is *durable*: as many nodes as a rank
has keepers may be lost, and all can return there; copies from before that are dropped then, and not
before.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from tmover.comm.fabric import Fabric
from tmover.comm.world import COPIES
from tmover.core import copies as placement
from tmover.core.events import NO_STEP, Member, Plan
from tmover.errors import Interrupted, LinkError, StateError
from tmover.state.capture import Tracked
from tmover.state.generations import Copying, Generation
from tmover.state.transfer import receive_generation, send_generation

logger = logging.getLogger(__name__)

_CONNECT_S = 60.0
_GLANCE_S = 0.25
_CLOSED = 1 << 62
"""An epoch later than all others."""


class Copies:
    """Own copies and those that are kept for others. Does nothing as long as it is not `active`."""

    def __init__(self, fabric: Fabric, *, job: str, every: int, nodes: int) -> None:
        """Copy after every step whose number, counted from 1, is a multiple of `every`."""
        self._fabric = fabric
        self._job = job
        self._every = every
        self._changed = threading.Condition()
        self._own: dict[int, Generation] = {}
        self._kept: dict[int, dict[int, Generation]] = {}
        """By rank and step."""
        self._copying: Copying | None = None
        self._newest: Copying | None = None
        self._acknowledged: dict[str, int] = {}
        """Up to which step each of the present keepers holds this rank's copies, by worker."""
        self._epoch = 0
        self.nodes = nodes
        """On how many other nodes each rank's copies are kept."""
        self.active = False
        """Whether this job needs copies: set when that is known."""
        self.durable = NO_STEP
        """The last step that no loss of so many nodes can undo, as all ranks have agreed."""
        self.reached = NO_STEP
        """The step that all have returned to last, or agreed to keep: nobody will do it again."""

    # --- the training's side ----------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether a copy is to be made after a step."""
        known = step in self._own or (self._newest and self._newest.generation.step == step)
        is_first = not self._own and self._newest is None
        return self.active and not known and (is_first or (step + 1) % self._every == 0)

    def take(self, tracked: Tracked, *, step: int, record: bytes) -> None:
        """Begin to copy what this rank holds after `step`."""
        self.hold_still()
        copying = Copying(tracked, step=step, record=record)
        with self._changed:
            self._copying = self._newest = copying
            self._changed.notify_all()

    def hold_still(self) -> None:
        """Return once nothing that is being copied is read any more: it may change then."""
        copying, self._copying = self._copying, None
        if copying is not None:
            self._complete(copying)

    def await_keepers(self, timeout_s: float) -> None:
        """Wait until all keepers hold the newest copy: so none ever lags by more than one.

        Raises `Interrupted` if the world breaks meanwhile, `LinkError` after the time.
        """
        deadline = time.monotonic() + timeout_s
        newest = self._newest
        due = NO_STEP if newest is None else newest.generation.step
        with self._changed:
            while self.held < due:
                self._fabric.present()
                if time.monotonic() > deadline:
                    who = ", ".join(p for p, held in self._acknowledged.items() if held < due)
                    msg = f"{who} did not acknowledge the copy of step {due} within {timeout_s:g} s"
                    raise LinkError(msg)
                self._changed.wait(_GLANCE_S)

    @property
    def held(self) -> int:
        """Up to which step every keeper holds this rank's copies."""
        with self._changed:
            return min(self._acknowledged.values(), default=NO_STEP)

    def agree(self, held: Sequence[int]) -> None:
        """Take note of what all have said in a vote that passed."""
        with self._changed:
            self.durable = max(self.durable, min(held))
            for copies in (self._own, *self._kept.values()):
                for step in [step for step in copies if step < self.durable]:
                    del copies[step]

    @property
    def host_bytes(self) -> int:
        """How much memory all copies here take."""
        with self._changed:
            held = [
                *self._own.values(),
                *(g for kept in self._kept.values() for g in kept.values()),
            ]
            newest = None if self._newest is None else self._newest.generation
            unfinished = [newest] if newest is not None and newest not in held else []
            return sum(generation.size_bytes for generation in [*held, *unfinished])

    def own(self, step: int) -> Generation:
        """Return this rank's copy of a step."""
        with self._changed:
            return self._own[step]

    def of(self, rank: int, step: int) -> Generation:
        """Return the copy of a step that this rank keeps for another one."""
        with self._changed:
            return self._kept[rank][step]

    def summary(self) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
        """Return the steps of this rank's copies, and of those it keeps, by rank."""
        with self._changed:
            kept = {rank: tuple(sorted(copies)) for rank, copies in self._kept.items() if copies}
            return tuple(sorted(self._own)), kept

    def return_to(self, step: int) -> None:
        """Forget what came after a step: it is done again."""
        self.hold_still()
        with self._changed:
            self._newest = None
            for copies in (self._own, *self._kept.values()):
                for later in [other for other in copies if other > step]:
                    del copies[later]

    def secure(self, tracked: Tracked, *, step: int, record: bytes, timeout_s: float) -> None:
        """Return once every rank's copy of `step` is kept: the last one of a loop that is left.

        Who has left a loop can do no step of it again. Whoever hears of this by all, or has
        returned to `step` with all, goes on; if the world breaks before, nobody has gone on, or
        the copies are there and all return to them. Raises `LinkError` or `Interrupted` then.
        """
        if not self.active or step == self.reached:
            return
        if step not in self._own and (not self._newest or self._newest.generation.step != step):
            self.take(tracked, step=step, record=record)
        self.await_keepers(timeout_s)
        self._fabric.exchange(b"")
        self.agree([step])
        self.reached = step

    # --- beside it --------------------------------------------------------------------------------

    def follow(self, nodes: int) -> None:
        """Keep copies on so many other nodes, as the job does; on none if it needs none."""
        if nodes not in (0, self.nodes):
            message = "[worker] copies = %d here, but the job keeps %d: so many as rank 0 has said"
            logger.warning(message, self.nodes, nodes)
        self.active = nodes > 0
        self.nodes = nodes or self.nodes

    def serve(self, plan: Plan, *, rank: int, nproc: int) -> None:
        """Send to the keepers, and receive from the wards, as long as this world holds."""
        size = len(plan.members)
        among = {"nodes": self.nodes, "nproc": nproc, "world_size": size}
        keepers = [plan.member(keeper) for keeper in placement.keepers(rank, **among)]
        wards = [plan.member(ward) for ward in placement.wards(rank, **among)]
        with self._changed:
            if not self.active or plan.epoch <= self._epoch:
                return
            self._epoch = plan.epoch
            self._acknowledged = {keeper.worker: NO_STEP for keeper in keepers}
            self._changed.notify_all()
        for keeper in keepers:
            self._start("send", self._send, plan.epoch, keeper)
        for ward in wards:
            self._start("keep", self._keep, plan.epoch, ward)

    def close(self) -> None:
        """End the threads, also those that still wait for a connection; nothing is copied now."""
        with self._changed:
            epoch, self._epoch, self.active = self._epoch, _CLOSED, False
            self._changed.notify_all()
        self._fabric.wiring.end_handoffs(epoch, "the copies are closed")

    def _complete(self, copying: Copying) -> Generation:
        generation = copying.finish()
        with self._changed:
            if self._newest is copying:
                self._own[generation.step] = generation
                self._changed.notify_all()
        return generation

    def _start(
        self, name: str, run: Callable[[int, Member], None], epoch: int, peer: Member
    ) -> None:
        threading.Thread(
            target=self._serve,
            args=(run, epoch, peer),
            name=f"tmover-copies-{name}-{peer.rank}",
            daemon=True,
        ).start()

    def _serve(self, run: Callable[[int, Member], None], epoch: int, peer: Member) -> None:
        """Run one connection; if it breaks, that breaks the world, as a link does."""
        try:
            run(epoch, peer)
        except Interrupted:
            return
        except (LinkError, StateError) as error:
            if not self._is_explained(epoch, peer.worker):
                self._fabric.observe(epoch, (peer.worker,), str(error))
        except Exception as error:  # noqa: BLE001 - a thread's edge: the next vote raises it
            self._fabric.fault = error

    def _is_explained(self, epoch: int, peer: str) -> bool:
        """Wait a little for what the peer's other links say; return whether it has ended well."""
        fabric, deadline = self._fabric, time.monotonic() + self._fabric.timeouts.unacked_s
        while time.monotonic() < deadline:
            world = fabric.worlds.of(epoch)
            if world is None or fabric.wiring.is_handoff_over(epoch) or self._epoch != epoch:
                return True
            if any(other.left for other in world.peers.values() if other.uid == peer):
                return True
            with self._changed:
                self._changed.wait(_GLANCE_S)
        return False

    def _send(self, epoch: int, keeper: Member) -> None:
        peer = keeper.worker
        sock = self._fabric.wiring.connect_state(
            peer, keeper.endpoint, epoch=epoch, timeout_s=_CONNECT_S, lane=COPIES
        )
        with sock:
            while (generation := self._next(epoch, peer)) is not None:
                send_generation(sock, generation, job=self._job, epoch=epoch, peer=peer)
                with self._changed:
                    if self._epoch == epoch:
                        held = self._acknowledged[peer]
                        self._acknowledged[peer] = max(held, generation.step)
                        self._changed.notify_all()

    def _next(self, epoch: int, peer: str) -> Generation | None:
        """Wait for a copy that this keeper does not hold; None once the epoch is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._epoch != epoch or self._unsent(peer) is not None)
            if self._epoch != epoch:
                return None
            unsent = self._unsent(peer)
        return self._complete(unsent) if isinstance(unsent, Copying) else unsent

    def _unsent(self, peer: str) -> Copying | Generation | None:
        newest, held = self._newest, self._acknowledged[peer]
        if newest is not None and newest.generation.step > held:
            return newest
        older = [step for step in self._own if step > held]
        return self._own[max(older)] if newest is None and older else None

    def _keep(self, epoch: int, ward: Member) -> None:
        peer = ward.worker
        sock = self._fabric.wiring.accept_state(
            peer, epoch=epoch, timeout_s=_CONNECT_S, lane=COPIES
        )
        with sock:
            while self._epoch == epoch:
                _await_word(sock)
                receive_generation(
                    sock,
                    job=self._job,
                    epoch=epoch,
                    keep=lambda generation: self._hold(ward.rank, generation),
                    peer=peer,
                )

    def _hold(self, rank: int, generation: Generation) -> None:
        with self._changed:
            self._kept.setdefault(rank, {})[generation.step] = generation


def _await_word(sock: socket.socket) -> None:
    """Wait for the next copy, which may be long in coming; or for the end of the epoch."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    poller.poll()
