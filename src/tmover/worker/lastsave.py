"""The checkpoint of survivors for whom no node has come: the last thing they do.

Each writes its own part, and those of ranks that it keeps records or copies for: it becomes such a
rank as a standby does, with what it would have handed over. Nothing is trained here after that, so
that no way back is needed. Whoever writes the part of the first rank waits for the others' parts
and makes them a checkpoint.
"""

from __future__ import annotations

import logging
import pathlib
from typing import TYPE_CHECKING

from tmover.comm import intercept
from tmover.core.events import Stored
from tmover.core.orders import Store
from tmover.errors import StateError, TmoverError
from tmover.state import shelf
from tmover.state.records import Record

if TYPE_CHECKING:
    from tmover.state.generations import Generation
    from tmover.worker.handover import Owner
    from tmover.worker.runtime import Runtime

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class LastSave:
    """One rank's part in it."""

    def __init__(self, runtime: Runtime, owner: Owner) -> None:
        self._runtime = runtime
        self._owner = owner
        self._said: Stored | None = None

    def write(self, order: Store) -> None:
        """Write what the order says, once; tell the controller, each time."""
        runtime, epoch = self._runtime, order.plan.epoch
        if self._said is None or self._said.epoch != epoch:
            reason = self._written(order, order.parts.get(runtime.worker, ()))
            job, worker, step = runtime.identity.job, runtime.worker, order.step
            self._said = Stored(job=job, worker=worker, epoch=epoch, step=step, reason=reason)
        runtime.send(self._said)

    def _written(self, order: Store, ranks: tuple[int, ...]) -> str:
        """Write the parts of these ranks; return why that cannot be done, "" if it is."""
        directory = self._owner.checkpoints.directory
        if directory is None:
            return "the script names no directory for checkpoints (session.checkpoint)"
        if shelf.has(directory, order.step):
            return ""
        tag = f"{self._runtime.mark or 'plain'}-{order.plan.epoch}"
        path = shelf.partial(directory, order.step, tag)
        try:
            self._write_parts(order, ranks, path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job ends without
            if shelf.has(directory, order.step):
                return ""
            shelf.give_up(path)
            logger.error("no checkpoint of step %d: %s", order.step, error)
            return str(error) if isinstance(error, TmoverError | OSError) else repr(error)
        return ""

    def _write_parts(self, order: Store, ranks: tuple[int, ...], path: pathlib.Path) -> None:
        from tmover.state.stored import Staged

        owner, replicas, step = self._owner, self._runtime.replicas, order.step
        self._runtime.copies.hold_still()
        owner.checkpoints.hold_still()
        mine = self._runtime.identity.rank
        kept = self._runtime.kept.get(step) or b""  # who it is of is known as long as `mine` holds
        for rank in ranks:
            copy, record = None, b""
            if order.back:
                copy = self._copy(rank, mine, step)
            else:
                record = owner.record() if rank == mine else self._replica(rank, kept)
            staged = Staged(
                owner.tracked, step=step, record=record, rank=rank, replicas=replicas, kept=copy
            )
            shelf.begin(path)
            staged.write(shelf.part(path, rank))
            self._runtime.trace.write("part", step=step, rank=rank)
        if 0 in ranks:
            self._complete(path, step)

    def _copy(self, rank: int, mine: int, step: int) -> Generation:
        """Return the copy of a rank's step, with groups and meshes as they are for that rank."""
        copies = self._runtime.copies
        if rank == mine:
            return copies.own(step)
        intercept.rebind(rank)
        return copies.of(rank, step)

    def _replica(self, rank: int, record: bytes) -> bytes:
        """Hold what a rank holds that this one is a replica of; return that rank's records."""
        if not record:
            msg = f"the records of rank {rank} are lost with the node that kept them"
            raise StateError(msg)
        owner, theirs = self._owner, Record.decode(record)
        Record.decode(owner.record()).refuse_unknown(theirs, owner.tracked)
        owner.rebind(rank)
        theirs.restore_private(owner.tracked)
        return record

    def _complete(self, path: pathlib.Path, step: int) -> None:
        """Make the parts a checkpoint once all are there; the controller ends it if they never are.

        One more than the script keeps is left then.
        """
        from tmover.state import stored

        runtime, standing = self._runtime, self._runtime.standing
        while not stored.is_written(path, len(runtime.replicas)):
            if shelf.is_given_up(path):
                msg = "another rank could not write its part"
                raise StateError(msg)
            standing.wait(lambda: standing.stop is not None, timeout_s=_LOOK_S)
            standing.raise_if_stopped()
        whole = stored.assemble(path, step=step, job=runtime.mark, replicas=runtime.replicas)
        shelf.sweep(whole.parent, until=step)
        runtime.trace.write("stored", step=step)
