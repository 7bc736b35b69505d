"""How the ranks of a job that starts go on from a checkpoint on storage.

They rehearse first, as a standby does, and for the same reason: what is laid out in the first steps
(DDP's buckets, an optimizer's state) is then as it was when the checkpoint was taken, and so are
the bits of what follows. Whatever a rehearsal did is overwritten by what is loaded.
"""

from __future__ import annotations

import torch.distributed as dist

from tmover.comm.fabric import Mode
from tmover.core.events import NO_STEP
from tmover.errors import ConfigError
from tmover.state.capture import Tracked
from tmover.state.loader import Batches
from tmover.state.shelf import Stored
from tmover.worker.checkpoints import UNNAMED, Checkpoints, Said, Seat, agree, announce
from tmover.worker.runtime import Runtime


class Resuming:
    """One rank's start. It is `pending` from the choice of a checkpoint until that is loaded."""

    def __init__(self, runtime: Runtime, checkpoints: Checkpoints) -> None:
        self._runtime = runtime
        self._checkpoints = checkpoints
        self._stored: Stored | None = None
        self._total = 0

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is still to be loaded."""
        return self._stored is not None

    @property
    def step(self) -> int:
        """The last step that is in the checkpoint to be loaded."""
        return NO_STEP if self._stored is None else self._stored.step

    def choose(self, total: int) -> None:
        """Agree with the other ranks on what to go on from: a collective.

        `total` is how many steps the loop has.
        """
        self._total = total
        runtime, directory = self._runtime, self._checkpoints.directory
        if directory is None:
            if runtime.resume:
                raise ConfigError(UNNAMED)
            return
        self._stored = agree(
            directory,
            job=runtime.mark,
            resume=runtime.resume,
            rank=runtime.identity.rank,
            gather=gather,
        )
        if self._stored is not None:
            runtime.isolation.begin()

    def seat(self) -> Seat:
        """Return what a checkpoint is taken as, at this boundary."""
        runtime = self._runtime
        rank, epoch = runtime.identity.rank, runtime.standing.rank.epoch
        return Seat(rank, runtime.replicas, job=runtime.mark, epoch=epoch)

    def load(self, tracked: Tracked, batches: Batches | None, *, seed: int) -> bytes:
        """Put all that is tracked to what it was; return this rank's record."""
        from tmover.state.stored import Place, restore

        stored, runtime = self._stored, self._runtime
        assert stored is not None
        assert batches is not None
        identity = runtime.identity
        place = Place(identity.rank, identity.world_size, seed)
        record = restore(stored, tracked, place, batches.position())
        self._checkpoints.gone_on_from(stored.step)
        runtime.standing.resumed(stored.step)
        runtime.trace.write("resumed", step=stored.step, path=str(stored.path))
        if identity.rank == 0:
            announce(stored, self._total)
        self._stored = None
        runtime.isolation.end()
        return record

    def let_alone(self) -> None:
        """Answer collectives locally: a rehearsed step begins."""
        self._runtime.fabric.mode = Mode.SANDBOX

    def let_back(self) -> None:
        """Answer them as the world does again."""
        runtime = self._runtime
        is_over = runtime.standing.rank.interrupted
        runtime.fabric.mode = Mode.REVOKED if is_over else Mode.LIVE


def gather(said: Said) -> list[Said]:
    """Return, on all ranks, what each of them says."""
    heard = [said] * dist.get_world_size()
    dist.all_gather_object(heard, said)
    return heard
