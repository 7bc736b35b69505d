"""What a rank hands over in a switch, and what it receives: live state, records, copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from tmover.core import rank as rules
from tmover.core.events import Member, Plan, Verified
from tmover.errors import Interrupted, LinkError, StateError
from tmover.state.records import Record
from tmover.state.transfer import Keeping, receive_state, send_generation, send_state
from tmover.worker.inject import Point
from tmover.worker.runtime import CONNECT_TIMEOUT_S, Runtime

if TYPE_CHECKING:
    import socket

    from tmover.state.capture import Tracked

_LISTEN_S = 0.05


class Owner(Protocol):
    """Whose state is handed over: what a switch asks of the session."""

    tracked: Tracked

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

    def send_all(self, plan: Plan, sources: dict[str, str], step: int) -> None:
        """Send this rank's state to every worker that is to have it from here."""
        runtime = self._runtime
        for member in plan.members:
            if sources.get(member.worker) != runtime.worker:
                continue
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
                    peer=member.worker,
                )
            runtime.injector.at(Point.AFTER_HANDOFF, step)

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

    def receive(self, plan: Plan, source: str, step: int) -> None:
        """Receive the state of `step`, which `source` is told to send."""
        runtime = self._runtime
        sock = runtime.fabric.accept_state(source, epoch=plan.epoch, timeout_s=CONNECT_TIMEOUT_S)
        self._receive_over(sock, plan, source, step)

    def receive_if_not_aborted(self, plan: Plan, source: str) -> bool:
        """Wait for the leaver's state; False if the move ended before it came."""
        runtime, standing, epoch = self._runtime, self._standing, plan.epoch
        while True:
            standing.raise_if_stopped()
            if epoch in standing.rank.revoked or epoch in runtime.aborted or standing.assign:
                msg = f"the move of epoch {epoch} ended before the state came"
                raise Interrupted(msg)
            try:
                sock = runtime.fabric.accept_state(source, epoch=epoch, timeout_s=_LISTEN_S)
            except TimeoutError:
                continue
            self._receive_over(sock, plan, source)
            return True

    @contextlib.contextmanager
    def _handing_over(self, plan: Plan, member: Member) -> Iterator[socket.socket]:
        """Connect to who is to have state. What he refuses is a broken link to him."""
        sock = self._runtime.fabric.connect_state(
            member.worker, member.endpoint, epoch=plan.epoch, timeout_s=CONNECT_TIMEOUT_S
        )
        try:
            with sock:
                yield sock
        except StateError as error:
            raise LinkError(str(error), (member.worker,)) from error

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

    def _receive_over(
        self, sock: socket.socket, plan: Plan, source: str, due: int | None = None
    ) -> None:
        runtime, standing = self._runtime, self._standing
        with standing.changing():
            standing.rank = rules.emptied(standing.rank)
        runtime.copies.hold_still()
        runtime.trace.write("handoff_begin", epoch=plan.epoch)
        try:
            with sock:
                step, record, keeping = receive_state(
                    sock,
                    job=runtime.identity.job,
                    epoch=plan.epoch,
                    tracked=self._owner.tracked,
                    step=due,
                    peer=source,
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
            Verified(job=runtime.identity.job, worker=runtime.worker, epoch=plan.epoch, step=step)
        )
        runtime.trace.write("handoff_end", epoch=plan.epoch, step=step)
