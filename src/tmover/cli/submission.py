"""A job is submitted to Slurm and made known to the controller, both or neither of them."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import pathlib
import select
import shlex
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import click

from tmover import wire
from tmover.agent.signals import SignalPipe
from tmover.cli import headless
from tmover.cli.stop import Stopped, stop_if_asked
from tmover.cli.text import plain
from tmover.controller.client import ask, read_address
from tmover.controller.keys import private_directory
from tmover.controller.starter import Starter, start_controller, uninterrupted
from tmover.errors import (
    ConfigError,
    ControllerUnavailable,
    SchedulerError,
    SlurmUnreachable,
    TmoverError,
)
from tmover.owner import is_anothers, user_name
from tmover.scheduler.hostlist import fold
from tmover.scheduler.slurm import render
from tmover.scheduler.slurm.client import SlurmClient
from tmover.scheduler.slurm.run import Run, run_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tmover.cli.batch import BatchJob
    from tmover.scheduler.slurm.commands import JobInfo

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.25
_SETTLED_S = 3.0
"""So long it takes Slurm to start a job, or to say why it waits."""
_ANSWER_S = 2.0
"""How long a controller on another machine may take to show that it is there."""


def submit(job: BatchJob, run: Run = run_command, *, as_json: bool) -> None:
    """Submit the job, tell the controller, and say where things are. Undo it all at Ctrl-C."""
    client = SlurmClient(run, timeout_s=job.configuration.slurm.command_s)
    if not client.ping():
        msg = "slurmctld does not answer, nothing was submitted; `scontrol ping` says more"
        raise SlurmUnreachable(msg)
    _ensure_controller(job, client)
    with SignalPipe(_ENDING) as signals:
        if job.headless:
            say = functools.partial(click.echo, err=True)
            number = headless.allocate(job, client, signals, say)
        else:
            number = _sbatch(job, client)
        with _undone_at_failure(job, client, number):
            stop_if_asked(signals)
            nnodes = _look_up(client, number).num_nodes
            _tell(job, number, nnodes)
            stop_if_asked(signals)
            info = _settled(client, number, signals)
            if job.headless:
                headless.start(job, number, info.nodes)
            stop_if_asked(signals)
        _report(job, info, nnodes, as_json=as_json)


def _sbatch(job: BatchJob, client: SlurmClient) -> str:
    """Submit the script; return Slurm's job id."""
    cwd = pathlib.Path.cwd()
    try:
        return client.submit(job.options(), job.script, args=job.arguments, env=job.env, cwd=cwd)
    except SlurmUnreachable as error:
        msg = f"{error}; it may have been submitted: see `squeue --me` before trying again"
        raise SlurmUnreachable(msg) from error


# --- the controller -------------------------------------------------------------------------------


def _ensure_controller(job: BatchJob, client: SlurmClient) -> None:
    """Have a controller run that the job's nodes can reach."""
    of_cluster = job.configuration.controller.state
    if is_anothers(job.state) or (of_cluster and pathlib.Path(of_cluster) == job.state):
        _require_controller(job)
    else:
        _start_controller(job)
    address = read_address(job.state).address
    if not _is_loopback(_host(address)):
        return
    away = next((node for node in client.nodes() if not _is_here(node.address)), None)
    if away is not None:
        where = f"the controller of {job.state} listens on {address}"
        mended = (
            "whoever runs it has to start it with --bind and an address that they can"
            if is_anothers(job.state)
            else f"start it with `tmover controller --state {job.state} --bind tcp://0.0.0.0:0`, "
            "or name another directory with --state"
        )
        msg = f"{where}, which nodes such as {away.name} cannot reach: {mended}"
        raise ConfigError(msg)


def _require_controller(job: BatchJob) -> None:
    """See that the controller answers that something else starts, such as the cluster's."""
    try:
        ask(job.state, wire.StatusRequest(ended=0), job.configuration.controller.request_s)
    except ControllerUnavailable as error:
        msg = f"{error}; nothing was submitted"
        raise ControllerUnavailable(msg) from error


def _start_controller(job: BatchJob) -> None:
    """Have a controller of the user's own run."""
    state = job.state
    starter = Starter(state, functools.partial(start_controller, flags=job.controller_flags()))
    if starter.running() is None and not _answers(job):
        private_directory(state)
        with starter.locked(), uninterrupted():
            starter.ensure()


def _answers(job: BatchJob) -> bool:
    """Return whether a controller that runs on another machine uses the state directory."""
    try:
        ask(job.state, wire.StatusRequest(ended=0), _ANSWER_S)
    except TmoverError:
        return False
    return True


def _host(address: str) -> str:
    """Return the host of an address.

    >>> _host("tcp://[::1]:5599"), _host("tcp://login1:5599")
    ('::1', 'login1')
    """
    return address.partition("//")[2].rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_here(host: str) -> bool:
    """Return whether a node is this machine, as far as its address tells."""
    if _is_loopback(host) or host == socket.gethostname():
        return True
    try:
        return _is_loopback(socket.gethostbyname(host))
    except OSError:
        return False


# --- both or neither ------------------------------------------------------------------------------


def _tell(job: BatchJob, number: str, nnodes: int) -> None:
    """Make the job known to the controller."""
    spec = wire.SlurmSpec(
        id=int(number),
        name=job.name,
        headless=job.headless,
        options=tuple(render.standby_base(job.asked, nnodes)),
        script=render.standby_script(job.text),
        arguments=job.arguments,
        cwd=str(pathlib.Path.cwd()),
        env=job.env,
    )
    request = wire.SubmitRequest(
        nnodes=nnodes,
        nproc=0,
        owner=user_name(),
        standby=job.standby,
        slurm=spec,
        pool=job.pool,
    )
    ask(job.state, request, job.configuration.controller.request_s)


@contextlib.contextmanager
def _undone_at_failure(job: BatchJob, client: SlurmClient, number: str) -> Iterator[None]:
    """Cancel the job if what follows fails, and say so."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(TmoverError):
            request = wire.CancelRequest(job=f"slurm{number}", reason="it could not be submitted")
            ask(job.state, request, job.configuration.controller.request_s)
        why = error.name if isinstance(error, Stopped) else "it could not be made known"
        try:
            client.cancel([number])
        except TmoverError as trouble:
            click.echo(plain(f"job {number} is left: `scancel {number}` ({trouble})"), err=True)
        else:
            click.echo(f"{why}: job {number} is cancelled", err=True)
        raise


def _look_up(client: SlurmClient, number: str) -> JobInfo:
    """Return how Slurm sees the job."""
    for info in client.jobs([user_name()]):
        if info.id == number:
            return info
    msg = f"Slurm does not show job {number} that it has just accepted"
    raise SchedulerError(msg)


def _settled(client: SlurmClient, number: str, signals: SignalPipe) -> JobInfo:
    """Return how Slurm sees the job once it has started, or Slurm says why it has not."""
    deadline = time.monotonic() + _SETTLED_S
    while True:
        info = _look_up(client, number)
        if not info.state.is_pending or info.reason or time.monotonic() > deadline:
            return info
        select.select([signals.fileno()], [], [], _POLL_S)
        stop_if_asked(signals)


# --- for people -----------------------------------------------------------------------------------


def _report(job: BatchJob, info: JobInfo, nnodes: int, *, as_json: bool) -> None:
    """Say what was submitted, where things are and what to type next."""
    waits = info.state.is_pending
    logs = job.logs(info.id)
    if as_json:
        shown = {
            "job": f"slurm{info.id}",
            "slurm": int(info.id),
            "name": job.name,
            "nodes": nnodes,
            "state": str(info.state.value),
            "reason": info.reason if waits else "",
            "standby": job.standby,
            "pool": job.pool,
            "headless": job.headless,
            "logs": logs,
            "state_directory": str(job.state),
        }
        click.echo(json.dumps(shown))
        return
    flag = f" --state {shlex.quote(str(job.state))}"
    why = f" ({info.reason})" if info.reason else ""
    how = f"waits for its nodes{why}" if waits else f"starts on {fold(info.nodes)}"
    click.echo(plain(f"job {info.id} ({job.name}), {nnodes} nodes: it {how}"))
    if job.standby:
        click.echo(f"  standby  {job.standby}, ordered as soon as its nodes are known")
    click.echo(plain(f"  logs     {logs}"))
    click.echo(plain(f"  look     tmover status {info.id}{flag}"))
    click.echo(plain(f"  move     tmover migrate NODE --job {info.id}{flag}"))
    click.echo(plain(f"  cancel   tmover cancel {info.id}{flag}"))
    sys.stdout.flush()
