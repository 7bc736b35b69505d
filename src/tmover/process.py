"""Processes of this machine: their identity, their descent, and that they end with their parent.

A process is named by its pid and its start time, because pids are used again. A zombie counts as
gone: whoever should reap it may be slow. Standard library only: the holder of a node imports this.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pathlib
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

SPARED = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""What Slurm sends to all processes of a job if asked to; none of tmover's dies of it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ProcessId(NamedTuple):
    """A process, distinct from a later one with the same pid."""

    pid: int
    ticks: int
    """When it started, in clock ticks since boot."""


def python_argv(module: str) -> list[str]:
    """Return how to run `module` with this interpreter, the current directory not importable."""
    isolated = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *isolated, "-m", module]


def spawn_apart(argv: Sequence[str], env: Mapping[str, str], log: pathlib.Path) -> int:
    """Start a process in a session of its own, its output added to `log`; return its pid.

    Signals of a terminal do to it what they do to any new process.
    """
    return os.posix_spawn(
        argv[0],
        list(argv),
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM),
    )


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends.

    `parent` is the pid the parent was known by; if it is not this process's parent any more, the
    parent ended before the request reached the kernel, and this process ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    alone = os.getppid() == 1 if parent is None else os.getppid() != parent
    if alone:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def identify(pid: int, *, ended: bool = False) -> ProcessId | None:
    """Return who runs under `pid` now, or None if nobody does.

    With `ended`, also who has ended and was not collected yet.
    """
    stat = _stat(pid)
    if stat is None or (stat[0] in "ZX" and not ended):
        return None
    return ProcessId(pid, int(stat[19]))


def is_alive(process: ProcessId) -> bool:
    """Return whether `process` still runs."""
    return identify(process.pid) == process


def is_stopped(process: ProcessId) -> bool:
    """Return whether `process` was stopped by a signal (SIGSTOP, SIGTSTP) and not continued."""
    stat = _stat(process.pid)
    return stat is not None and int(stat[19]) == process.ticks and stat[0] == "T"


def exit_status(process: ProcessId) -> int | None:
    """Return how a process ended that its parent has not collected yet, negative for a signal."""
    stat = _stat(process.pid)
    if stat is None or int(stat[19]) != process.ticks or stat[0] not in "ZX":
        return None
    return os.waitstatus_to_exitcode(int(stat[49]))


def describe(code: int) -> str:
    """Return an exit status in words.

    >>> describe(-9), describe(1)
    ('was ended by SIGKILL', 'exited with code 1')
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def children(parent: int) -> list[ProcessId]:
    """Return the living children of a process, oldest first."""
    found = [process for process, above in _table() if above == parent]
    return sorted(found, key=lambda process: (process.ticks, process.pid))


def descendants(*roots: int) -> set[ProcessId]:
    """Return the living processes of `roots` and below."""
    below: dict[int, list[ProcessId]] = {}
    found: list[ProcessId] = []
    for process, parent in _table():
        below.setdefault(parent, []).append(process)
        if process.pid in roots:
            found.append(process)
    seen: set[ProcessId] = set()
    while found:
        process = found.pop()
        if process not in seen:
            seen.add(process)
            found.extend(below.get(process.pid, ()))
    return seen


def marked(variable: str, value: str) -> set[ProcessId]:
    """Return the living processes that were started with `variable=value` in their environment."""
    needle = f"{variable}={value}".encode()
    found = set()
    for process, _ in _table():
        with contextlib.suppress(OSError):
            if needle in pathlib.Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.add(process)
    return found


def send_signal(process: ProcessId, number: int) -> None:
    """Signal `process` if it still runs."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def open_pidfd(process: ProcessId) -> int | None:
    """Return a descriptor that becomes readable when `process` ends; None if it has ended."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if is_alive(process):
        return fd
    os.close(fd)
    return None


def wait_gone(processes: Iterable[ProcessId], *, timeout_s: float) -> set[ProcessId]:
    """Wait until all have ended; return those that have not when the time is over."""
    poller = select.poll()
    waiting: dict[int, ProcessId] = {}
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            fd = open_pidfd(process)
            if fd is not None:
                waiting[fd] = process
                poller.register(fd, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000):
                poller.unregister(fd)
                os.close(fd)
                del waiting[fd]
        return set(waiting.values())
    finally:
        for fd in waiting:
            os.close(fd)


def reap(pid: int) -> bool:
    """Collect the child `pid` if it has ended; return whether there is nothing left to collect."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except OSError as error:
        if error.errno != errno.ECHILD:
            raise
        return True


def _table() -> Iterator[tuple[ProcessId, int]]:
    """Yield the living processes, each with its parent."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        stat = _stat(pid)
        if stat is not None and stat[0] not in "ZX":
            yield ProcessId(pid, int(stat[19])), int(stat[1])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on: state, parent, ..., start (19)."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return None
    return text.rpartition(b")")[2].decode().split() or None


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
