"""Nobody sees what a script does while it is unwound: neither files, nor terminals, nor peers.

A standby's script that is to be run again as another rank ends by an exception in the middle of its
loop. Its `finally` and `with` blocks run then, and what they would save, print, send or end is
not the job's.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tmover.comm.fabric import Fabric
from tmover.worker.detour import Detour, Function


class Unseen(BaseException):
    """What the script wanted to do would end its process, or start another."""


class Nowhere:
    """A way on which nothing is written. See `detour.Way`."""

    def look(self, path: str) -> str:
        """Let everything be seen."""
        return path

    def put(self, path: str, *, keep: bool, new: bool = False) -> str | None:
        """Let nothing be written, but for devices."""
        return path if path.startswith("/dev/") else None

    def drop(self, path: str) -> str | None:
        """Let nothing be removed."""
        return None

    def pair(self, name: str, old: str, new: str) -> tuple[str, str] | None:
        """Let nothing be renamed."""
        return None

    def entries(self, path: str) -> list[os.DirEntry[str]] | None:
        """Let everything be seen."""
        return None


@contextlib.contextmanager
def curtain(
    fabric: Fabric | None = None, *, redirected: bool = False, ours: Callable[[str], bool] = bool
) -> Iterator[None]:
    """Hide what this process's script does until the block is left.

    Files it opens for writing are none, and those that it has open take nothing; if `redirected`,
    what it writes goes elsewhere anyway. What it prints is dropped. To end the process, to send it
    a signal or to start another raises `Unseen`, in the main thread. Collectives are answered at
    once. `ours` says of an open file's path whether it is tmover's own; without it every one is.
    """
    with contextlib.ExitStack() as stack:
        if fabric is not None:
            stack.enter_context(_no_refusal(fabric))
        if not redirected:
            stack.callback(Detour(Nowhere(), reads=False).remove)
            stack.enter_context(_deaf(_open_files(ours)))
        stack.enter_context(_refused())
        stack.enter_context(_silent())
        yield


@contextlib.contextmanager
def _no_refusal(fabric: Fabric) -> Iterator[None]:
    """Let a collective be answered wherever in the script it stands."""
    before = fabric.refusal, fabric.caution
    fabric.refusal = fabric.caution = ""
    try:
        yield
    finally:
        fabric.refusal, fabric.caution = before


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Let the main thread neither end this process nor start another."""
    refused: list[tuple[Any, str, Function]] = []
    for owner, name, own_only in (
        (os, "_exit", False),
        (os, "abort", False),
        (os, "kill", True),
        (os, "killpg", False),
        (os, "fork", False),
        (os, "system", False),
        (os, "execv", False),
        (os, "execve", False),
        (os, "posix_spawn", False),
        (signal, "raise_signal", False),
        (subprocess.Popen, "__init__", False),
    ):
        before = getattr(owner, name)
        refused.append((owner, name, before))
        setattr(owner, name, _raising(before, name, own_only=own_only))
    try:
        yield
    finally:
        for owner, name, before in refused:
            setattr(owner, name, before)


def _raising(before: Function, name: str, *, own_only: bool) -> Function:
    def refusal(*args: Any, **kwargs: Any) -> Any:
        is_script = threading.current_thread() is threading.main_thread()
        if not is_script or (own_only and args[:1] not in ((os.getpid(),), (0,))):
            return before(*args, **kwargs)
        msg = f"{name} in a script that is unwound"
        raise Unseen(msg)

    return refusal


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what is printed, by whatever library."""
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        numbers = {1, 2}
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
                    numbers.add(stream.fileno())
        stack.enter_context(_deaf(sorted(numbers)))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


@contextlib.contextmanager
def _deaf(numbers: list[int]) -> Iterator[None]:
    """Let these open files take nothing; one that is closed meanwhile is left so."""
    if not numbers:
        yield
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    kept: list[tuple[int, int, bool]] = []
    for number in numbers:
        with contextlib.suppress(OSError):
            inherited = os.get_inheritable(number)
            kept.append((number, os.dup(number), inherited))
            os.dup2(nothing, number, inheritable=inherited)
    try:
        yield
    finally:
        same = os.fstat(nothing)
        _flush({number for number, _, _ in kept})
        for number, saved, inherited in kept:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(number), same):
                    os.dup2(saved, number, inheritable=inherited)
            os.close(saved)
        os.close(nothing)


def _flush(numbers: set[int]) -> None:
    """Write out what Python still holds of these files."""
    if not numbers:
        return
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    types = {kind for kind in set(map(type, gc.get_objects())) if issubclass(kind, kinds)}
    for each in gc.get_objects():
        if type(each) in types:
            with contextlib.suppress(OSError, ValueError):
                if each.fileno() in numbers:
                    each.flush()


def _open_files(ours: Callable[[str], bool]) -> list[int]:
    """Return the numbers of regular files that are open for writing, the standard ones apart."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        number = int(each)
        with contextlib.suppress(OSError):
            is_file = stat.S_ISREG(os.fstat(number).st_mode)
            if number > 2 and is_file and not ours(os.readlink(f"/proc/self/fd/{number}")):
                found.append(number)
    _flush(set(found))
    return found
