"""How the agent starts its workers: through torchrun, unless a test brings a quicker way."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Mapping
from typing import Protocol

from tmover.agent.torchrun import PARENT
from tmover.errors import ConfigError
from tmover.process import SPARED, python_argv


class Launch(Protocol):
    """One torchrun and its workers."""

    @property
    def pid(self) -> int:
        """The process above the workers."""
        ...

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""
        ...


class Launcher(Protocol):
    """Starts workers, as often as the controller says.

    It is made before the agent has any thread; it may keep a process of its own for later launches.
    """

    command: WorkerCommand
    """What workers run. It may be another one from some launch on, in another directory."""

    def launch(self, env: Mapping[str, str]) -> Launch:
        """Start all workers of the node, with `env` beside the agent's own environment."""
        ...

    def close(self) -> None:
        """Give up what is kept for later launches."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """What each worker of a node runs, as `tmover run` was told."""

    nproc: int
    script: str
    """A path, or a module's name if `module`."""
    arguments: tuple[str, ...] = ()
    module: bool = False
    flags: tuple[str, ...] = ()
    """Torchrun's flags that are passed on as they are."""

    def worker_argv(self) -> list[str]:
        """Return the arguments of `python -m tmover.worker`."""
        return [*(["-m"] if self.module else []), self.script, *self.arguments]

    def torchrun_argv(self) -> list[str]:
        """Return torchrun's arguments.

        Torchrun keeps logs only if told where: its default is a temporary directory that it never
        removes. It does not restart anything: that is the controller's to decide. It seldom looks
        at its workers: the agent sees them end at once, and how, if torchrun was not quicker.
        """
        logs = [] if "--log-dir" in self.flags else ["--log-dir", os.devnull]
        seldom = [] if "--monitor-interval" in self.flags else ["--monitor-interval=1"]
        return [
            "--nnodes=1",
            f"--nproc-per-node={self.nproc}",
            "--max-restarts=0",
            *logs,
            *seldom,
            *self.flags,
            "--module",
            "tmover.worker",
            *self.worker_argv(),
        ]


class TorchrunLauncher:
    """Runs torchrun for this node alone."""

    def __init__(self, command: WorkerCommand) -> None:
        self.command = command

    def launch(self, env: Mapping[str, str]) -> Launch:
        """Start torchrun in a process group of its own: a Ctrl-C goes to the agent alone.

        What it is spared stays blocked in its workers, until they handle it.
        """
        argv = [*python_argv("tmover.agent.torchrun"), *self.command.torchrun_argv()]
        environment = {**os.environ, **env, PARENT: str(os.getpid())}
        pid = os.posix_spawn(argv[0], argv, environment, setpgroup=0, setsigmask=SPARED)
        return _Torchrun(pid)

    def close(self) -> None:
        """Nothing is kept."""


class _Torchrun:
    """A torchrun that this process started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


def count_workers(text: str) -> int:
    """Return what `--nproc-per-node` means here. Raises `ConfigError`.

    >>> count_workers("8")
    8
    """
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    if text not in {"auto", "cpu", "gpu", "xpu"}:
        msg = f"--nproc-per-node {text}: write a number above 0, or auto, cpu, gpu, xpu"
        raise ConfigError(msg)
    done = subprocess.run(
        [*python_argv("tmover.agent.torchrun"), "--count", text],
        env={**os.environ, PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not done.stdout.strip().isdigit():
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        msg = f"--nproc-per-node {text}: torch cannot say how many: {why}"
        raise ConfigError(msg)
    return int(done.stdout)
