"""`tmover wait`: wait for the end of a job, and end as it did."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from tmover.cli.duration import duration
from tmover.cli.number import Number
from tmover.cli.state import state_option
from tmover.cli.text import Text, plain
from tmover.process import SPARED, exit_status, identify, is_alive

if TYPE_CHECKING:
    from tmover.wire import JobStatus

TIMED_OUT = 124
"""Exit code if the job has not ended in time, as that of `timeout`."""
_POLL_S = 1.0
_ASK_S = 5.0
_LOOK_S = 0.1
_READ_S = 10.0
_GOODBYE_S = 5.0
"""How much longer than an agent an srun may take to end after its job."""


@click.command(name="wait")
@click.argument("job", type=Text(), required=False)
@click.option("--timeout", "timeout_s", type=duration, help="Wait no longer. [default: for ever]")
@click.option(
    "--patience",
    "patience_s",
    type=duration,
    default="10m",
    show_default=True,
    help="How long the controller may be away.",
)
@click.option(
    "--srun",
    "pid",
    type=Number(1),
    metavar="PID",
    help="The srun in the background: if it has ended and no node has joined, end as it did.",
)
@state_option
def command(
    *,
    job: str | None,
    timeout_s: float | None,
    patience_s: float,
    pid: int | None,
    state: pathlib.Path | None,
) -> None:
    """Wait until JOB has ended, and end with its exit code.

    Without JOB: the job of this Slurm allocation, else the only one there is. As the last line of a
    batch script it has `sacct` show how the training ended. Says nothing, except on a terminal. In
    a standby's script it ends with 0 as soon as the job is not on this node.

    An srun that was not told of a lost node waits for it: start it in the background, and then
    `exec tmover wait --srun $!`. As long as that runs, the controller may be away for any time. A
    job that ended before its controller did is known by the journal.

    Exit codes: the job's; 2 the job is not known, 4 no controller answers, 124 the time is over.
    """
    from tmover.config import load, state_directory
    from tmover.environment import own_job

    def show(text: str) -> None:
        if sys.stdout.isatty():
            click.echo(plain(text))

    signal.pthread_sigmask(signal.SIG_BLOCK, SPARED)  # of a headless job, it is in a job step
    name = job if job is not None else own_job(os.environ)
    unknown_s = load().agent.join_s if job is None and name is not None else 0.0
    lookout = Lookout(state_directory(state), name, patience_s, unknown_s=unknown_s)
    node = None if job is not None else standby_node(os.environ)
    srun = None if pid is None else Background(pid)
    code = wait(lookout.look, show, timeout_s=timeout_s, node=node, srun=srun)
    if srun is not None and code is not None:
        srun.see_off(load().agent.stop_s + _GOODBYE_S)
    sys.exit(TIMED_OUT if code is None else code)


def standby_node(environ: Mapping[str, str]) -> str | None:
    """Return this node if the script that runs on it is a standby's, or None.

    >>> standby_node({"TMOVER_ROLE": "standby", "SLURMD_NODENAME": "node7"})
    'node7'
    """
    if environ.get("TMOVER_ROLE") != "standby":
        return None
    return environ.get("TMOVER_NODE") or environ.get("SLURMD_NODENAME") or None


class Background:
    """A process that the shell before this one has started, and that may be this one's child."""

    def __init__(self, pid: int) -> None:
        self._process = identify(pid, ended=True)
        self._code = 1
        """How it ended; 1 if that is not known any more."""
        self.has_exited = False
        """Whether it ended by itself, not by a signal: then its job step has ended, too."""

    def has_ended(self) -> bool:
        """Return whether it runs no more."""
        if self._process is None:
            return True
        code = exit_status(self._process)
        if code is not None:
            self._code = code
            self.has_exited = code >= 0
        if code is not None or not is_alive(self._process):
            self._process = None
        return self._process is None

    def see_off(self, timeout_s: float) -> None:
        """Wait until it has ended, though not for ever: nodes that are lost never tell it."""
        deadline = time.monotonic() + timeout_s
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    @property
    def code(self) -> int:
        """What to end with if its job never came about: never 0."""
        return exit_code(self._code) or 1


class Lookout:
    """Asks for a job's status, and bears with a controller that is away for a while."""

    def __init__(
        self, state: pathlib.Path, job: str | None, patience_s: float, *, unknown_s: float = 0.0
    ) -> None:
        """For `unknown_s`, a job that is not known yet is waited for: Slurm is quick to start."""
        self._state = state
        self._job = job
        self._patience_s = patience_s
        self._heard_at = time.monotonic()
        self._known_by = self._heard_at + unknown_s
        self._read_at = 0.0
        """When the journal may be read again, while no controller answers."""

    def look(self) -> JobStatus | None:
        """Return the status, or None while no controller answers and the job has not ended.

        Raises `ControllerUnavailable` once patience is over, `ConfigError` if there is no such job.
        """
        from tmover.controller.client import ask
        from tmover.errors import ConfigError, ControllerUnavailable, Refused
        from tmover.wire import StatusReply, StatusRequest

        try:
            answer = ask(self._state, StatusRequest(job=self._job), _ASK_S)
        except ControllerUnavailable:
            ended = self._journaled()
            if ended is not None:
                return ended
            if time.monotonic() - self._heard_at > self._patience_s:
                raise
            return None
        except Refused as error:
            if time.monotonic() < self._known_by:
                return None
            msg = f"{error}; `tmover status` lists the jobs of {self._state}"
            raise ConfigError(msg) from error
        self._heard_at = time.monotonic()
        if not isinstance(answer, StatusReply):
            return None
        status = _only(answer.jobs)
        self._job = status.job
        return status

    def _journaled(self) -> JobStatus | None:
        """Return the status of a job that has ended before its controller did, by the journal."""
        from tmover.controller.archive import Archive
        from tmover.wire import StatusRequest

        now = time.monotonic()
        if now < self._read_at or not Archive.is_there(self._state):
            return None
        self._read_at = now + _READ_S
        archive = Archive(self._state)
        if self._job is not None:
            return archive.ended(self._job)
        (jobs, _) = archive.reply(StatusRequest())
        [only, *more] = jobs.jobs or (None,)
        return None if more or only is None or only.code is None else only


def _only(jobs: tuple[JobStatus, ...]) -> JobStatus:
    """Return the only job, or the only one that has not ended."""
    from tmover.errors import ConfigError

    live = [job for job in jobs if job.code is None]
    some = jobs if len(jobs) == 1 else live
    if len(some) == 1:
        return some[0]
    msg = f"several jobs run here, name one: {', '.join(job.job for job in live)}"
    raise ConfigError(msg if live else "no job runs here: name the one to wait for")


def wait(
    look: Callable[[], JobStatus | None],
    show: Callable[[str], object] = lambda text: None,
    *,
    timeout_s: float | None = None,
    node: str | None = None,
    srun: Background | None = None,
    poll_s: float = _POLL_S,
) -> int | None:
    """Return the exit code of the job once it has ended, or None if that takes too long.

    With `node`, 0 as soon as the job is not there, or `srun` says that it is only in another job
    of Slurm. With `srun`, how that ended if the job is nowhere after its end.
    """
    from tmover.cli.watch import JobWatch
    from tmover.errors import ConfigError, ControllerUnavailable

    watch = JobWatch()
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        is_over = srun is None or srun.has_ended()  # before the look: then all have joined who will
        try:
            status = look()
        except (ControllerUnavailable, ConfigError):
            if is_over:
                raise
            status = None  # ranks that train do without a controller: Slurm must not end them
        for news in () if status is None else watch.look(status):
            show(str(news))
        if status is not None and status.code is not None:
            return exit_code(status.code)
        held = () if status is None else status.nodes
        is_elsewhere = node not in held or (srun is not None and srun.has_exited)
        if status is not None and is_over and node is not None and is_elsewhere:
            return 0
        if status is not None and is_over and srun is not None and not held:
            return srun.code
        if until is not None and time.monotonic() >= until:
            return None
        left = poll_s if until is None else until - time.monotonic()
        time.sleep(max(0.0, min(poll_s, left)))


def exit_code(code: int) -> int:
    """Return what a process can end with.

    >>> exit_code(3), exit_code(-9), exit_code(1000)
    (3, 137, 255)
    """
    return min(code if code >= 0 else 128 - code, 255)
