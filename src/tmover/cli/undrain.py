"""`tmover undrain`: take nodes that tmover drained back into service."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from tmover.cli.hosts import flat, hostlist
from tmover.cli.state import state_option
from tmover.cli.text import plain

if TYPE_CHECKING:
    from tmover.controller.client import Client
    from tmover.scheduler.slurm.client import SlurmClient
    from tmover.scheduler.slurm.commands import NodeDetail

FOREIGN = 2
"""Exit code if a node was drained by somebody else."""


@click.command(name="undrain")
@click.argument("nodes", type=hostlist, nargs=-1, required=True, metavar="NODE...")
@state_option
def command(*, nodes: tuple[tuple[str, ...], ...], state: pathlib.Path | None) -> None:
    """Resume each NODE in Slurm, if tmover drained it, and let jobs use it again.

    NODE may be a hostlist such as node[1-4]. tmover's drains, those of its health check included,
    have a reason that begins with `tmover:`. A node that somebody else drained, or that is down,
    stays as it is. Jobs that had left the node, or lost it, may have a standby there again.

    Exit codes: 0 all nodes are in service, 2 one was drained by somebody else or is down, 3 Slurm
    does not answer or refuses.
    """
    from tmover.config import load, state_directory
    from tmover.controller.client import Client
    from tmover.errors import ControllerUnavailable
    from tmover.scheduler.slurm.client import SlurmClient

    def say(text: str) -> None:
        click.echo(plain(text))

    names = flat(nodes)
    configuration = load()
    ready = undrain(SlurmClient(timeout_s=configuration.slurm.command_s), names, say)
    try:
        with Client(state_directory(state)) as client:
            tell(client, ready, say, configuration.controller.request_s)
    except ControllerUnavailable as error:
        if ready:
            say(f"no job was told: {error}")
    sys.exit(0 if len(ready) == len(names) else FOREIGN)


def undrain(slurm: SlurmClient, names: Sequence[str], say: Callable[[str], object]) -> list[str]:
    """Resume what was drained by tmover; return the nodes that are in service now.

    Raises `SchedulerError` if Slurm does not answer or refuses.
    """
    from tmover.errors import ConfigError

    known = {node.name: node for node in slurm.nodes()}
    strange = [name for name in names if name not in known]
    if strange:
        msg = f"Slurm knows no node {', '.join(strange)}"
        raise ConfigError(msg)
    return [name for name in names if _undrain_one(slurm, known[name], say)]


def _undrain_one(slurm: SlurmClient, node: NodeDetail, say: Callable[[str], object]) -> bool:
    from tmover.scheduler.interface import NodeState
    from tmover.scheduler.slurm import drains

    if node.state.is_usable:
        say(f"{node.name} is not drained")
        return True
    if node.state not in (NodeState.DRAINING, NodeState.DRAINED):
        say(f"{node.name} is {node.slurm_state.lower()}, and stays so: {node.reason}")
        return False
    if not drains.is_ours(node.reason):
        say(f"{node.name} stays drained, by somebody else: {node.reason or 'no reason is given'}")
        return False
    slurm.resume(node.name)
    say(f"{node.name} is in service again; it was drained: {node.reason}")
    return True


def tell(
    client: Client, nodes: Sequence[str], say: Callable[[str], object], request_s: float
) -> None:
    """Have all jobs know that they may use the nodes again."""
    from tmover.cli.moving import live_jobs
    from tmover.errors import Refused
    from tmover.wire import Accepted, ReadyRequest

    for job in live_jobs(client, request_s):
        for node in nodes:
            try:
                answer = client.request(ReadyRequest(job=job.job, node=node), request_s)
            except Refused:  # it has ended meanwhile
                break
            if isinstance(answer, Accepted):
                say(f"job {job.job}: {answer.text}")
