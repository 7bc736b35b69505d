"""The engine of a script run without tmover: `python train.py`, or plain `torchrun`.

The same loop over the same batches in the same order, so that leaving tmover, or comparing with it,
takes no change of the script.

A checkpoint that is asked for by SIGUSR1 at any rank is agreed on as under tmover: what ranks were
asked in one step is summed up while the next one runs, by a group on the CPU that nobody waits for
longer than for the slowest rank's last step; the checkpoint is taken after that next step.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tmover.environment import WorkerEnvironment
from tmover.errors import ConfigError
from tmover.state.capture import Tracked
from tmover.state.loader import Batches
from tmover.state.records import Record
from tmover.worker import signals
from tmover.worker.checkpoints import UNNAMED, Checkpoints, Seat, agree, announce
from tmover.worker.session import Step

_Said = TypeVar("_Said")


class PlainEngine:
    """Trains; nothing is voted on, nothing is done again."""

    sandbox = False

    def __init__(self, *, backend: str | None, seed: int) -> None:
        self._seed = seed
        self.tracked = Tracked()
        self.checkpoints = Checkpoints()
        self._replicas: tuple[int, ...] = ()
        self._batches: Batches | None = None
        self._total = 0
        self._next = 0
        self._finals = 0
        if not dist.is_initialized():
            self._init_process_group(backend)
        self._poll = _Poll(signals.listen())

    @staticmethod
    def _init_process_group(backend: str | None) -> None:
        chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if "RANK" in os.environ:
            dist.init_process_group(chosen)
        else:
            dist.init_process_group(chosen, store=dist.HashStore(), rank=0, world_size=1)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this node."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def begin(self, loader: Any, total: int | None, *, undo: bool) -> int:
        """Open the loop; nothing is ever undone."""
        del undo
        self._batches = Batches(loader, seed=self._seed, rank=self.rank)
        self._total = self._batches.length() if total is None else total
        self._resume(self._batches)
        return self._total

    def _resume(self, batches: Batches) -> None:
        """Go on from a checkpoint, if that was asked for."""
        directory, resume = self.checkpoints.directory, WorkerEnvironment.read().resume
        if directory is None:
            if resume:
                raise ConfigError(UNNAMED)
            return
        stored = agree(directory, job="", resume=resume, rank=self.rank, gather=self._poll.gather)
        if stored is None:
            return
        from tmover.state.stored import Place, restore

        place = Place(self.rank, self.world_size, self._seed)
        record = Record.decode(restore(stored, self.tracked, place, batches.position()))
        record.restore_private(self.tracked)
        record.restore_rng()
        if record.position is not None:
            batches.seek(record.position)
        self._next = stored.step + 1
        self.checkpoints.gone_on_from(stored.step)
        if self.rank == 0:
            announce(stored, self._total)

    def _save(self, step: int) -> None:
        """Take a checkpoint if one is due after `step`."""
        assert self._batches is not None
        if not self.checkpoints.is_due(step):
            return
        if not self._replicas:
            held = self._poll.gather(self.tracked.holdings())
            self._replicas = tuple(map(held.index, held))
        record = Record.capture(self.tracked, position=self._batches.position()).encode()
        seat = Seat(self.rank, self._replicas, job="", epoch=0)
        self.checkpoints.boundary(self.tracked, step=step, record=record, seat=seat)
        self.checkpoints.hold_still()

    def leave(self) -> None:
        """Leave the loop: nothing is to be done."""

    def break_off(self) -> None:
        """Leave the loop early: as anybody may who trains without tmover."""

    def next_step(self) -> Step | None:
        """Return the next step, or None at the end."""
        self._save(self._next - 1)
        if self._next >= self._total:
            self._poll.end()
            self.checkpoints.finish(0, is_over=lambda: False)
            return None
        assert self._batches is not None
        self._next += 1
        return Step(self, self._next - 1, self._batches.next())

    def final_step(self, index: int) -> Step | None:
        """Return the collective part after the loop, once."""
        if self._finals > index:
            return None
        self._finals += 1
        return Step(self, self._total + index, None)

    def open(self, step: Step) -> None:
        """Begin: nothing to prepare."""

    def close(self, step: Step, error: BaseException | None) -> bool:
        """End: committed unless the body raised."""
        step.committed = error is None
        if step.committed:
            step.durable = step.index
            step.checkpoint_requested = self._poll.next()
            if step.checkpoint_requested:
                self.checkpoints.ask(step.index)
        return False


class _Poll:
    """Whether any rank was asked for a checkpoint: the same answer after the same step on all."""

    def __init__(self, requests: signals.CheckpointSignal) -> None:
        self._requests = requests
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._asked = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None

    def gather(self, said: _Said) -> list[_Said]:
        """Return what each rank says."""
        heard = [said] * dist.get_world_size()
        if self._group is not None:
            dist.all_gather_object(heard, said, group=self._group)
        return heard

    def end(self) -> None:
        """Wait for the last count: a process that ends in the middle of one is aborted by torch."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def next(self) -> bool:
        """Return what was asked before the last step's end, and have what was asked since counted.

        While a checkpoint is taken nothing is counted: a late signal is no request for another.
        """
        if self._pending is not None:
            self._pending.wait()
        asked = bool(self._asked.item())
        if asked:
            self._requests.answered()
        again = self._requests.take() and not asked
        self._asked = torch.tensor([again], dtype=torch.int32)
        if self._group is not None:
            self._pending = dist.all_reduce(self._asked, group=self._group, async_op=True)
        return asked
