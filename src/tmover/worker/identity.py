"""Who this process is in the job, and the environment variables that say so to the script."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Identity:
    """A worker's place. On a standby it is a rehearsal until the worker is promoted."""

    job: str
    agent: str
    local_rank: int
    slot: int
    nnodes: int
    nproc: int
    sandbox: bool

    @property
    def worker(self) -> str:
        """The name of this process, unlike that of any other in the job's life."""
        return f"{self.agent}/{self.local_rank}"

    @property
    def rank(self) -> int:
        """The rank of this process; ranks follow the slot."""
        return self.slot * self.nproc + self.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return self.nnodes * self.nproc

    def at_rank(self, rank: int) -> Identity:
        """Return the identity of the same process holding `rank`."""
        return dataclasses.replace(self, slot=rank // self.nproc)

    def live(self) -> Identity:
        """Return the identity once it is no rehearsal any more."""
        return dataclasses.replace(self, sandbox=False)

    def export(self) -> None:
        """Say it to the script in torchrun's own variables."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.nproc),
            GROUP_RANK=str(self.slot),
            GROUP_WORLD_SIZE=str(self.nnodes),
            ROLE_RANK=str(self.rank),
            ROLE_WORLD_SIZE=str(self.world_size),
        )
