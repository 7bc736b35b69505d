"""`tmover submit`: start a job."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import select
import shlex
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING

import click

from tmover.agent.signals import SignalPipe
from tmover.cli.run import check_script
from tmover.cli.state import state_option
from tmover.cli.text import Text, is_utf8, plain
from tmover.errors import ConfigError, ControllerUnavailable, TmoverError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tmover.cluster import JobSpec, LocalCluster
    from tmover.wire import JobStatus

_POLL_S = 0.25
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that cancel the job. They are heard between two looks at it, so that none gets lost."""
_KILLING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that come too late when the job is cancelled already; Ctrl-C then hurries."""


@click.command(name="submit", options_metavar="--local [OPTIONS] --")
@click.option("--local", is_flag=True, help="On this machine: nodes are groups of processes.")
@click.option(
    "--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes of the job."
)
@click.option(
    "--standby", type=click.IntRange(0), default=0, show_default=True, help="Nodes that stand by."
)
@click.option(
    "--nproc-per-node", default="1", show_default=True, metavar="N", help="Ranks per node."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option("--detach", is_flag=True, help="Return at once; the job goes on.")
@click.option("--config", type=click.Path(path_type=pathlib.Path), help="Configuration file.")
@state_option
@click.argument("script", type=Text(), required=False)
@click.argument("arguments", nargs=-1, type=Text(), metavar="[ARGS]...")
def command(
    *,
    local: bool,
    nodes: int,
    standby: int,
    nproc_per_node: str,
    module: bool,
    detach: bool,
    config: pathlib.Path | None,
    state: pathlib.Path | None,
    script: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Start SCRIPT on several nodes, with standbys that take a node's place.

    \b
    tmover submit --local --nodes 4 --standby 1 -- train.py --lr 3e-4

    Starts a controller if none runs on the state directory, shows what happens until the job ends,
    and exits with the job's code. Ctrl-C cancels the job; `--detach` leaves it running.
    """  # noqa: D301 - click keeps the lines of a paragraph after a backspace
    from tmover.cluster import LocalCluster
    from tmover.config import load, state_directory

    if not local:
        msg = "nodes of another scheduler cannot be had yet: add --local"
        raise ConfigError(msg)
    checked = check_script(script, module=module, command="submit")
    configuration = load(config)
    spec = _job_spec(nodes, standby, nproc_per_node, checked, *arguments, module=module)
    if config is not None:
        spec = dataclasses.replace(spec, env={**spec.env, "TMOVER_CONFIG": str(config.absolute())})
    directory = state_directory(state)
    with SignalPipe(_KILLING), LocalCluster(directory, configuration) as cluster:
        with SignalPipe(_ENDING) as signals:
            job = cluster.submit(spec)
            _greet(cluster, job, state, detach=detach)
            if not detach:
                sys.exit(_show(cluster, job, signals))
        _detach(cluster, job)


def _job_spec(
    nodes: int, standby: int, nproc_per_node: str, script: str, *arguments: str, module: bool
) -> JobSpec:
    """Return the job that the command line describes; it inherits this process's environment."""
    from tmover.agent.launcher import count_workers
    from tmover.cluster import JobSpec, agent_argv

    nproc = count_workers(nproc_per_node)
    for name, value in os.environ.items():
        if not is_utf8(name + value):
            msg = f"the nodes get this environment, and its {plain(name)} is not UTF-8: unset it"
            raise ConfigError(msg)
    return JobSpec(
        nodes=nodes,
        standby=standby,
        nproc=nproc,
        argv=agent_argv(script, *arguments, nproc=nproc, module=module),
        env=dict(os.environ),
        cwd=pathlib.Path.cwd(),
    )


def _greet(cluster: LocalCluster, job: str, state: pathlib.Path | None, *, detach: bool) -> None:
    """Say where things are and what to type next."""
    from tmover.scheduler.hostlist import fold

    flag = "" if state is None else f" --state {shlex.quote(str(state))}"
    cancel = f"tmover cancel {job}{flag}" if detach else "Ctrl-C"
    click.echo(f"job {job} starts on {fold(cluster.scheduler.running(job))}")
    click.echo(f"  logs     {cluster.logs(job)}/node*.log")
    click.echo(f"  look     tmover status {job}{flag}")
    click.echo(f"  move     tmover migrate NODE --job {job}{flag}")
    click.echo(f"  cancel   {cancel}")


def _detach(cluster: LocalCluster, job: str) -> None:
    """Return in this process; another one stays until the job has ended, and cleans up after it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        cluster.detach()
        return
    code = 1
    try:
        os.setsid()
        log = os.open(
            cluster.logs(job) / "submit.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        null = os.open(os.devnull, os.O_RDONLY)
        for number, source in enumerate((null, log, log)):
            os.dup2(source, number)
        with cluster, SignalPipe(_ENDING) as signals:
            code = follow(cluster, job, click.echo, signals=signals)
    except TmoverError as error:
        click.echo(f"error: {error}")
        code = error.exit_code
    except BaseException:  # noqa: BLE001 - nobody above would say it: this process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _show(cluster: LocalCluster, job: str, signals: SignalPipe) -> int:
    """Follow the job, on a terminal with a line that tells where it is."""
    if not sys.stdout.isatty():
        return follow(cluster, job, click.echo, signals=signals)
    from rich.console import Console
    from rich.markup import escape

    from tmover.cli.watch import summary

    console = Console(highlight=False, markup=False)
    with console.status(f"job {job}") as line:
        return follow(
            cluster,
            job,
            console.print,
            show=lambda status: line.update(escape(plain(summary(status)))),
            signals=signals,
        )


def follow(
    cluster: LocalCluster,
    job: str,
    say: Callable[[str], object],
    *,
    show: Callable[[JobStatus], object] = lambda status: None,
    signals: SignalPipe | None = None,
    patience_s: float | None = None,
) -> int:
    """Say what happens until the job has ended; return its exit code, or that of a signal.

    A job of which nothing has run for `patience_s` (two leases) is given up.
    """
    from tmover.cli.watch import JobWatch

    patience_s = patience_s or 2 * cluster.config.controller.lease_s
    lookout = Lookout(cluster, job, say)
    watch, running_at = JobWatch(), time.monotonic()
    while not cluster.is_gone():
        status = lookout.look()
        if status is not None:
            for news in watch.look(status):
                say(plain(str(news)))
            show(status)
            if status.code is not None:
                say(f"job {job} has ended: {status.outcome}, exit code {status.code}")
                return status.code if status.code >= 0 else 128 - status.code
        if lookout.runs():
            running_at = time.monotonic()
        elif time.monotonic() - running_at > patience_s:
            say(f"nothing of job {job} runs any more; see the logs in {cluster.logs(job)}")
            return 1
        number = _wait(signals)
        if number is not None:
            say(f"{signal.Signals(number).name}: job {job} is cancelled")
            return 128 + number
    say(f"the state directory {cluster.state} is gone: job {job} can be reached no more, and ends")
    return 1


class Lookout:
    """Looks at one job. What keeps it from seeing is said once, and never ends the job.

    Training needs no controller: only the nodes tell whether the job lives when none answers.
    """

    def __init__(self, cluster: LocalCluster, job: str, say: Callable[[str], object]) -> None:
        self._cluster = cluster
        self._job = job
        self._say = say
        self._trouble = ""
        self._start_at = 0.0
        """When the next controller may be started; 0 unless the last one did not start."""

    def look(self) -> JobStatus | None:
        """Return how the job is, or None if that cannot be told; have a controller run."""
        try:
            if self._cluster.controller() is None:
                self._start()
            status = self._cluster.status(self._job)
        except TmoverError as error:
            self._note(str(error))
            return None
        self._trouble = ""
        return status

    def runs(self) -> bool:
        """Return whether something of the job runs; also if that cannot be told."""
        try:
            return bool(self._cluster.scheduler.running(self._job))
        except TmoverError as error:
            self._note(str(error))
            return True

    def _start(self) -> None:
        """Start a controller; one that does not start is tried again a lease later."""
        if time.monotonic() < self._start_at:
            raise ControllerUnavailable(self._trouble)
        if not self._start_at:
            self._say("the controller is gone; the job goes on, starting another one")
        self._start_at = time.monotonic() + self._cluster.config.controller.lease_s
        self._cluster.ensure_controller()
        self._start_at = 0.0

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._say(f"{trouble}; job {self._job} goes on, this is tried again")
        self._trouble = trouble


def _wait(signals: SignalPipe | None) -> int | None:
    """Wait until it is time to look again; return the signal that came instead, if one did."""
    sources = [] if signals is None else [signals]
    select.select(sources, [], [], _POLL_S)
    return next((number for source in sources for number in source.take()), None)
