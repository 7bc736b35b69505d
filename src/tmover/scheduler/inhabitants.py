"""Who is who among the processes of a local node, for those who end one on purpose."""

from __future__ import annotations

import contextlib
import pathlib

from tmover.errors import SchedulerError
from tmover.process import ProcessId, children, descendants

WORKER_NAME = "tmover-rank{}"
"""What a worker's main thread is called if its environment does not tell its local rank."""


def find_agent(holder: ProcessId) -> ProcessId:
    """Return the agent of the node with this holder."""
    for process in children(holder.pid):
        return process
    msg = f"no agent runs below process {holder.pid}"
    raise SchedulerError(msg)


def find_worker(holder: ProcessId, local_rank: int) -> ProcessId:
    """Return the process that is this local rank of the node with this holder."""
    found = {p for p in descendants(holder.pid) if _is_worker(p.pid, local_rank)}
    below = {child for process in found for child in children(process.pid)}
    for process in found - below:  # its own children, such as loader workers, look alike
        return process
    msg = f"no worker {local_rank} runs below process {holder.pid}"
    raise SchedulerError(msg)


def _is_worker(pid: int, local_rank: int) -> bool:
    with contextlib.suppress(OSError):
        proc = pathlib.Path(f"/proc/{pid}")
        if (proc / "comm").read_text().strip() == WORKER_NAME.format(local_rank):
            return True
        environment = (proc / "environ").read_bytes().split(b"\0")
        is_rank = f"LOCAL_RANK={local_rank}".encode() in environment
        return is_rank and b"tmover.worker" in (proc / "cmdline").read_bytes().split(b"\0")
    return False
