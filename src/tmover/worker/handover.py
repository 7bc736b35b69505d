"""What a rank hands over in a switch, and what it receives: live state, records, copies."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from tmover.core import rank as rules
from tmover.core.events import Member, Plan, Verified
from tmover.core.orders import Assign, Prepare
from tmover.errors import Interrupted, LinkError, StateError
from tmover.state.helping import send_share
from tmover.state.messages import Purpose
from tmover.state.records import Record
from tmover.state.transfer import (
    TIMEOUT_S,
    Keeping,
    receive_state,
    send_generation,
    send_state,
)
from tmover.worker.inject import Point
from tmover.worker.runtime import CONNECT_TIMEOUT_S, Runtime

if TYPE_CHECKING:
    import socket

    from tmover.state.capture import Tracked
    from tmover.worker.checkpoints import Checkpoints

_LISTEN_S = 0.05


class Owner(Protocol):
    """Whose state is handed over: what a switch asks of the session."""

    tracked: Tracked
    checkpoints: Checkpoints

    def rebind(self, rank: int) -> None:
        """Hold `rank` from now on."""

    def record(self) -> bytes:
        """Return this rank's own records as of the step it stands at."""

    def adopt(self, record: bytes) -> None:
        """Go on where the owner of `record` stood."""


class Handover:
    """One rank's ends of all hand-offs. Raises `LinkError` if one breaks, whoever is to blame."""

    def __init__(self, runtime: Runtime, owner: Owner) -> None:
        self._runtime = runtime
        self._owner = owner
        self._standing = runtime.standing
        self.connect_s = 0.0
        """How long it took to open the links of the world to come, in seconds."""

    def send_all(self, order: Prepare | Assign, step: int) -> None:
        """Send this rank's state, or its part of it, to every worker that is to have it from here.

        All go through the receivers in the same order, so nobody waits for who waits for him.
        """
        me = self._runtime.worker
        for member in order.plan.members:
            if order.sources.get(member.worker) == me:
                self._send_state(order, member, step)
            elif me in order.helpers.get(member.worker, ()):
                self._send_share(order, member, step)

    def _send_state(self, order: Prepare | Assign, member: Member, step: int) -> None:
        runtime, plan = self._runtime, order.plan
        record, own = self._record_of(member.rank, step), self._owner.record()
        if record and own and record != own:
            Record.decode(own).refuse_unknown(Record.decode(record), self._owner.tracked)
        runtime.injector.at(Point.BEFORE_HANDOFF, step)
        with self._handing_over(plan, member) as sock:
            send_state(
                sock,
                job=runtime.identity.job,
                epoch=plan.epoch,
                step=step,
                tracked=self._owner.tracked,
                record=record,
                own=own,
                keeping=self._keeping(),
                available=1 + len(order.helpers.get(member.worker, ())),
                peer=member.worker,
            )
        runtime.injector.at(Point.AFTER_HANDOFF, step)

    def _send_share(self, order: Prepare | Assign, member: Member, step: int) -> None:
        runtime, epoch = self._runtime, order.plan.epoch
        helpers = order.helpers[member.worker]

        def connect() -> socket.socket:
            runtime.injector.at(Point.BEFORE_HANDOFF, step)
            return self._connect(epoch, member)

        with _refusals_of(member):
            sent = send_share(
                connect,
                Purpose(runtime.identity.job, epoch, step),
                tracked=self._owner.tracked,
                source=1 + helpers.index(runtime.worker),
                available=1 + len(helpers),
                peer=member.worker,
                timeout_s=TIMEOUT_S,
            )
        if sent:
            runtime.trace.write("helped", epoch=epoch, step=step, bytes=sent)

    def go_back(self, step: int) -> None:
        """Go back to this rank's own copy of a step, and forget what came after."""
        runtime, copies = self._runtime, self._runtime.copies
        copies.return_to(step)
        generation = copies.own(step)
        generation.restore(self._owner.tracked)
        self._owner.adopt(generation.record)
        self._standing.applied(step)
        runtime.trace.write("returned", step=step)

    def send_copies(self, plan: Plan, sources: dict[str, str], step: int) -> None:
        """Send the copies this rank keeps to every worker that is to have them from here."""
        runtime = self._runtime
        for member in plan.members:
            if sources.get(member.worker) != runtime.worker:
                continue
            runtime.injector.at(Point.BEFORE_HANDOFF, step)
            generation = runtime.copies.of(member.rank, step)
            with self._handing_over(plan, member) as sock:
                send_generation(
                    sock,
                    generation,
                    job=runtime.identity.job,
                    epoch=plan.epoch,
                    keeping=self._keeping(),
                    peer=member.worker,
                )
            runtime.injector.at(Point.AFTER_HANDOFF, step)

    def receive(self, order: Assign) -> None:
        """Receive the state of the order's step from whoever is told to send it."""
        epoch, source = order.plan.epoch, order.sources[self._runtime.worker]
        sock = self._runtime.fabric.accept_state(source, epoch=epoch, timeout_s=CONNECT_TIMEOUT_S)
        self._receive_over(sock, order, order.step)

    def receive_if_not_aborted(self, order: Prepare) -> bool:
        """Wait for the leaver's state; False if the move ended before it came."""
        runtime, standing, epoch = self._runtime, self._standing, order.plan.epoch
        source = order.sources[runtime.worker]
        while True:
            standing.raise_if_stopped()
            if epoch in standing.rank.revoked or epoch in runtime.aborted or standing.assign:
                msg = f"the move of epoch {epoch} ended before the state came"
                raise Interrupted(msg)
            try:
                sock = runtime.fabric.accept_state(source, epoch=epoch, timeout_s=_LISTEN_S)
            except TimeoutError:
                continue
            self._receive_over(sock, order, None)
            return True

    @contextlib.contextmanager
    def _handing_over(self, plan: Plan, member: Member) -> Iterator[socket.socket]:
        """Connect to who is to have state. What he refuses is a broken link to him."""
        sock = self._connect(plan.epoch, member)
        with sock, _refusals_of(member):
            yield sock

    def _connect(self, epoch: int, member: Member) -> socket.socket:
        return self._runtime.fabric.connect_state(
            member.worker, member.endpoint, epoch=epoch, timeout_s=CONNECT_TIMEOUT_S
        )

    def _keeping(self) -> Keeping:
        runtime = self._runtime
        copies = runtime.copies.nodes if runtime.copies.active else 0
        return Keeping(keepers=runtime.keepers, copies=copies, replicas=runtime.replicas)

    def _record_of(self, rank: int, step: int) -> bytes:
        """Return the private records of `rank` as of `step`: this rank's own, or what it keeps."""
        runtime = self._runtime
        if rank == runtime.identity.rank:
            return self._owner.record()
        if rank != runtime.ward():
            return b""
        return runtime.kept.get(step) or b""

    def _receive_over(self, sock: socket.socket, order: Prepare | Assign, due: int | None) -> None:
        runtime, standing, epoch = self._runtime, self._standing, order.plan.epoch
        source = order.sources[runtime.worker]
        with standing.changing():
            standing.rank = rules.emptied(standing.rank)
        runtime.copies.hold_still()
        runtime.trace.write("handoff_begin", epoch=epoch)
        began = time.monotonic()

        def from_helper(helper: str) -> socket.socket:
            return runtime.fabric.accept_state(helper, epoch=epoch, timeout_s=CONNECT_TIMEOUT_S)

        helpers = order.helpers.get(runtime.worker, ())
        try:
            with sock:
                step, record, keeping = receive_state(
                    sock,
                    job=runtime.identity.job,
                    epoch=epoch,
                    tracked=self._owner.tracked,
                    step=due,
                    peer=source,
                    others={name: functools.partial(from_helper, name) for name in helpers},
                    progress=lambda: runtime.injector.at(Point.IN_HANDOFF, None),
                )
        except StateError as error:
            raise LinkError(str(error), (source,)) from error
        if not record:
            msg = (
                f"the records of rank {runtime.identity.rank} (random streams, loader position) "
                "are lost with the node that kept them: start the job again from a checkpoint"
            )
            raise StateError(msg)
        runtime.keepers, runtime.replicas = keeping.keepers, keeping.replicas
        runtime.copies.follow(keeping.copies)
        self._owner.adopt(record)
        standing.applied(step)
        runtime.send(
            Verified(
                job=runtime.identity.job,
                worker=runtime.worker,
                epoch=epoch,
                step=step,
                connect_s=round(self.connect_s, 6),
                receive_s=round(time.monotonic() - began, 6),
            )
        )
        runtime.trace.write("handoff_end", epoch=epoch, step=step)


@contextlib.contextmanager
def _refusals_of(member: Member) -> Iterator[None]:
    """Take what a receiver refuses for a broken link to it."""
    try:
        yield
    except StateError as error:
        raise LinkError(str(error), (member.worker,)) from error
