"""`python -m tmover.agent.torchrun`: torchrun, tied to the life of the agent that started it.

Torchrun's own way to run alone on a node, `--standalone`, opens a store on all addresses of the
machine, reads pickles from it and runs what they say, whoever wrote them. Here its rendezvous is a
file in memory that no other user can open, and nothing listens.

With `--count KIND` it prints how many workers `--nproc-per-node KIND` means on this node instead:
the agent must know that, and imports no torch.

The agent starts it with SIGUSR1 and SIGUSR2 blocked, which Slurm sends to all processes of a job:
torchrun would die of them. Its workers inherit that, until they handle both.
"""

from __future__ import annotations

import os
import sys

from tmover.process import die_with_parent

PARENT = "TMOVER_PARENT_PID"
"""Names the process that must be the parent of the one that reads it."""


def main(argv: list[str] | None = None) -> None:
    """Run torchrun with `argv`."""
    argv = sys.argv[1:] if argv is None else argv
    parent = os.environ.get(PARENT)
    die_with_parent(None if parent is None else int(parent))
    os.environ[PARENT] = str(os.getpid())
    import torch.distributed.run

    if argv[:1] == ["--count"]:
        print(torch.distributed.run.determine_local_world_size(argv[1]))
        return
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torch.distributed.run.main([*rendezvous_flags(), *argv])


def rendezvous_flags() -> list[str]:
    """Return flags for a rendezvous of this process with itself, in a file without a name."""
    store = os.memfd_create("tmover-rendezvous")
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=/proc/self/fd/{store}",
        "--rdzv-conf=store_type=file",
    ]


if __name__ == "__main__":
    main()
