"""A job without a batch host: `salloc --no-shell` holds its nodes, each runs the script by itself.

What is started here outlives `tmover submit`: the job steps need neither it nor their srun.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tmover.cli.batch import headless_directory, real_srun
from tmover.cli.stop import Stopped
from tmover.controller.keys import private_directory
from tmover.errors import ConfigError, SchedulerError
from tmover.process import ProcessId, exit_status, identify, spawn_apart, wait_gone
from tmover.scheduler.slurm import render
from tmover.scheduler.slurm.commands import salloc_argv

if TYPE_CHECKING:
    from tmover.agent.signals import SignalPipe
    from tmover.cli.batch import BatchJob
    from tmover.scheduler.slurm.client import SlurmClient

_ALLOCATION = re.compile(r"[Aa]llocation (\d+)")
_REVOKED_S = 5.0
_SETTLED_S = 1.0
"""An srun that has not ended after so long has started its job step, or waits for it."""


# --- the allocation -------------------------------------------------------------------------------


def allocate(
    job: BatchJob, client: SlurmClient, signals: SignalPipe, say: Callable[[str], object]
) -> str:
    """Hold the job's nodes; return Slurm's job id. A signal meanwhile takes the request back."""
    argv = salloc_argv(job.options())
    try:
        salloc = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_salloc_environment(job.env),
            start_new_session=True,
        )
    except OSError as error:
        msg = f"salloc cannot be run: {(error.strerror or str(error)).lower()}"
        raise SchedulerError(msg) from error
    with salloc:
        return _Allocation(salloc, client, say).wait(signals)


class _Allocation:
    """What a running salloc says."""

    def __init__(
        self, salloc: subprocess.Popen[bytes], client: SlurmClient, say: Callable[[str], object]
    ) -> None:
        self._salloc = salloc
        self._client = client
        self._say = say
        self._number = ""
        self._said: list[str] = []
        self._rest = b""

    def wait(self, signals: SignalPipe) -> str:
        """Return the job's id once it has its nodes."""
        assert self._salloc.stderr is not None  # noqa: S101 - it was asked for
        heard = self._salloc.stderr.fileno()
        while True:
            readable, _, _ = select.select([heard, signals.fileno()], [], [])
            for number in signals.take():
                self._take_back()
                self._say(f"{signal.Signals(number).name}: nothing was submitted")
                raise Stopped(number)
            if heard in readable:
                data = os.read(heard, 65536)
                if not data:
                    self._hear(b"\n")
                    break
                self._hear(data)
        if self._salloc.wait() == 0 and self._number:
            return self._number
        self._cancel()
        why = "; ".join(line for line in self._said if "error" in line) or "; ".join(self._said)
        msg = f"salloc holds no nodes: {why or 'it said nothing'}"
        raise SchedulerError(msg)

    def _hear(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").removeprefix("salloc: ").strip()
            self._said.append(text)
            found = _ALLOCATION.search(text)
            if found is None:
                continue
            self._number = found[1]
            if "ending" in text:
                self._say(f"job {found[1]} waits for its nodes; Ctrl-C takes it back")

    def _take_back(self) -> None:
        """End salloc, and what it may have got meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            self._salloc.send_signal(signal.SIGINT)
        try:
            _, rest = self._salloc.communicate(timeout=_REVOKED_S)
            self._hear(rest + b"\n")
        except subprocess.TimeoutExpired:
            self._salloc.kill()
        self._cancel()

    def _cancel(self) -> None:
        if self._number:
            with contextlib.suppress(SchedulerError):
                self._client.cancel([self._number])


def _salloc_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which salloc is asked for what sbatch would be."""
    ours = {
        f"SALLOC_{name.removeprefix('SBATCH_')}": value
        for name, value in env.items()
        if name.startswith("SBATCH_")
    }
    return {**ours, **env, "LC_ALL": "C"}


# --- the job steps --------------------------------------------------------------------------------


def start(job: BatchJob, number: str, nodes: Sequence[str]) -> None:
    """Start the script on each node. Raises `SchedulerError` with what the first srun said."""
    directory = private_directory(headless_directory(job, number))
    shims = private_directory(directory / "bin")
    script = directory / "script"
    _write(script, job.text)
    _write(shims / "srun", render.shim(real_srun()))
    env = {**job.env, "PATH": f"{shims}{os.pathsep}{job.env.get('PATH', os.defpath)}"}
    started: dict[ProcessId, pathlib.Path] = {}
    for slot, node in enumerate(nodes):
        argv = render.step_argv(
            number, node, [str(script), *job.arguments], name=job.name, cwd=job.cwd, asked=job.asked
        )
        log = directory / f"srun.{node}.log"
        process = _spawn([real_srun(), *argv[1:]], {**env, "TMOVER_SLOT": str(slot)}, log)
        started[process] = log
    _check(started)


def _check(started: Mapping[ProcessId, pathlib.Path]) -> None:
    """See that no srun has failed at once."""
    alive = wait_gone(started, timeout_s=_SETTLED_S)
    for process in set(started) - alive:
        if exit_status(process):
            said = started[process].read_text(errors="replace").strip().splitlines()
            msg = f"a node could not be started: {said[-1] if said else started[process]}"
            raise SchedulerError(msg)


def _spawn(argv: Sequence[str], env: Mapping[str, str], log: pathlib.Path) -> ProcessId:
    """Start a process of its own session that outlives this one."""
    pid = spawn_apart(argv, env, log)
    return identify(pid) or ProcessId(pid, int(time.monotonic()))


def _write(path: pathlib.Path, text: str) -> None:
    """Write a program that only its owner can run."""
    try:
        path.write_text(text)
        path.chmod(0o700)
    except OSError as error:
        msg = f"cannot write {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(msg) from error
