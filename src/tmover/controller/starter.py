"""Sees to it that a controller runs on a state directory, whoever needs one first."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from tmover.controller.client import read_address
from tmover.errors import ConfigError, ControllerUnavailable, TmoverError
from tmover.process import ProcessId, identify, is_alive, python_argv, reap, spawn_apart

_POLL_S = 0.01
_START_S = 30.0


class StartController(Protocol):
    """Starts a controller on a state directory, its output going to a log; returns its pid."""

    def __call__(self, state: pathlib.Path, log: pathlib.Path) -> int:
        """Start it; it is known to be ready when `controller.json` names its pid."""
        ...


def start_controller(state: pathlib.Path, log: pathlib.Path, *, flags: Sequence[str] = ()) -> int:
    """Start `tmover controller` as a process of its own session."""
    argv = [*python_argv("tmover"), "--log-level", "INFO", "controller", "--state", str(state)]
    argv.extend(flags)
    return spawn_apart(argv, os.environ, log)


class Starter:
    """Starts the controller of one state directory if none runs there."""

    def __init__(self, state: pathlib.Path, start: StartController = start_controller) -> None:
        self._state = state
        self._start = start
        self._children: set[int] = set()

    def running(self) -> ProcessId | None:
        """Return the controller's process, or None if none runs on this machine."""
        try:
            address = read_address(self._state)
        except TmoverError:
            return None
        if address.host not in ("", socket.gethostname()):
            return None  # here, that number is some other process's
        return identify(address.pid)

    def ensure(self) -> ProcessId | None:
        """Start one if none runs; return its process, or None if none had to be started.

        The caller holds `locked`. Raises `ControllerUnavailable` with what it said last.
        """
        if self.running() is not None:
            return None
        log = self._state / "logs" / "controller.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = log.stat().st_size if log.exists() else 0
        pid = self._start(self._state, log)
        self._children.add(pid)
        started = identify(pid)
        deadline = time.monotonic() + _START_S
        while (ready := self.running()) is None or ready.pid != pid:
            if started is None or not is_alive(started) or time.monotonic() > deadline:
                self.collect()
                last = log.read_bytes()[began:].decode(errors="replace").strip().splitlines()
                why = last[-1] if last else "it said nothing"
                msg = f"the controller did not start: {why} (see {log})"
                raise ControllerUnavailable(msg)
            time.sleep(_POLL_S)
        return ready

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from starting or ending the controller meanwhile."""
        path = self._state / "controller.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            msg = f"cannot use {path}: {(error.strerror or str(error)).lower()}"
            raise ConfigError(msg) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def collect(self) -> None:
        """Reap the controllers this process started that have ended."""
        for pid in list(self._children):
            if reap(pid):
                self._children.discard(pid)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and its like until what was started is on record, and will be ended."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
