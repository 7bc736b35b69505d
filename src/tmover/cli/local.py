"""`tmover submit --local`: a job on nodes that are groups of processes of this machine."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import shlex
import signal
import sys
import traceback
from typing import TYPE_CHECKING

import click

from tmover.agent.signals import SignalPipe
from tmover.cli.follow import follow
from tmover.cli.text import is_utf8, plain
from tmover.errors import ConfigError, TmoverError

if TYPE_CHECKING:
    from tmover.cluster import JobSpec, LocalCluster
    from tmover.config import Config

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that cancel the job. They are heard between two looks at it, so that none gets lost."""
_KILLING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that come too late when the job is cancelled already; Ctrl-C then hurries."""


def run(
    spec: JobSpec,
    configuration: Config,
    state: pathlib.Path | None,
    *,
    config: pathlib.Path | None,
    detach: bool,
) -> None:
    """Start the job, follow it unless it is detached, and exit with its code."""
    from tmover.cluster import LocalCluster
    from tmover.config import own_state_directory, state_directory
    from tmover.controller.starter import start_controller
    from tmover.owner import is_anothers

    spec = configured(spec, config)
    directory = state_directory(state, configuration=configuration)
    if state is None and is_anothers(directory):  # the cluster's controller cannot see these nodes
        directory = state = own_state_directory()
    flags = () if config is None else ("--config", str(config.absolute()))
    start = functools.partial(start_controller, flags=flags)
    with SignalPipe(_KILLING), LocalCluster(directory, configuration, start=start) as cluster:
        with SignalPipe(_ENDING) as signals:
            job = cluster.submit(spec)
            _greet(cluster, job, state, detach=detach)
            if not detach:
                sys.exit(_show(cluster, job, signals))
        _detach(cluster, job)


def configured(spec: JobSpec, config: pathlib.Path | None) -> JobSpec:
    """Return the job with the configuration file, if there is one, for its nodes too."""
    if config is None:
        return spec
    return dataclasses.replace(spec, env={**spec.env, "TMOVER_CONFIG": str(config.absolute())})


def job_spec(
    nodes: int,
    standby: int,
    nproc_per_node: str,
    script: str,
    *arguments: str,
    module: bool,
    resume: bool = False,
    pool: str = "",
    refill: bool = False,
) -> JobSpec:
    """Return the job that the command line describes; it inherits this process's environment."""
    from tmover.agent.launcher import count_workers
    from tmover.cluster import JobSpec, agent_argv

    nproc = count_workers(nproc_per_node)
    check_environment()
    return JobSpec(
        nodes=nodes,
        standby=standby,
        nproc=nproc,
        argv=agent_argv(script, *arguments, nproc=nproc, module=module),
        env={**os.environ, **({"TMOVER_RESUME": "1"} if resume else {})},
        cwd=pathlib.Path.cwd(),
        pool=pool,
        refill=refill,
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


def check_environment() -> None:
    """Raise `ConfigError` if the environment, which a job's nodes get, cannot be sent."""
    for name, value in os.environ.items():
        if not is_utf8(name + value):
            msg = f"the nodes get this environment, and its {plain(name)} is not UTF-8: unset it"
            raise ConfigError(msg)
