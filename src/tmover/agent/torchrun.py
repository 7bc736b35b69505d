"""`python -m tmover.agent.torchrun`: torchrun, tied to the life of the agent that started it.

With `--count KIND` it prints how many workers `--nproc-per-node KIND` means on this node instead:
the agent must know that, and imports no torch.
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
    torch.distributed.run.main(argv)


if __name__ == "__main__":
    main()
