"""Ends everything that runs on a node of the local scheduler, as a power cut would."""

from __future__ import annotations

import signal
import time

from tmover.errors import SchedulerError
from tmover.process import ProcessId, descendants, is_alive, marked, send_signal, wait_gone

MARK = "TMOVER_NODE_MARK"
"""Stands in the environment of everything that runs on a node."""

_ROUNDS = 100
_DIE_S = 10.0


def kill_everything(holder: ProcessId | None, mark: str) -> float:
    """Kill what descends from `holder` and what carries `mark`.

    Returns, once it is gone, the time of the monotonic clock since when none of it ran.

    All of it is stopped before any of it is killed, so that no process sees another one die and
    says so. Raises `SchedulerError` if a process outlives its SIGKILL (it hangs in the kernel).
    """
    stopped_at = 0.0
    for _ in range(_ROUNDS):
        everything = _processes(holder, mark)
        if not everything:
            return stopped_at or time.monotonic()
        for process in everything:
            send_signal(process, signal.SIGSTOP)
        stopped_at = stopped_at or time.monotonic()
        for process in everything:
            send_signal(process, signal.SIGKILL)
        if wait_gone(everything, timeout_s=_DIE_S):
            break
    pids = ", ".join(str(process.pid) for process in sorted(_processes(holder, mark)))
    msg = f"processes {pids} do not end, though killed; look at their state with ps"
    raise SchedulerError(msg)


def _processes(holder: ProcessId | None, mark: str) -> set[ProcessId]:
    found = marked(MARK, mark)
    if holder is not None and is_alive(holder):
        found |= descendants(holder.pid)
    return found
