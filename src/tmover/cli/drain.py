"""`tmover drain`: take nodes out of service, and tmover's jobs off them."""

from __future__ import annotations

import json
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from tmover.cli.duration import duration
from tmover.cli.hosts import flat, hostlist
from tmover.cli.state import state_option
from tmover.cli.text import Text, plain
from tmover.cli.watch import News

if TYPE_CHECKING:
    from tmover.controller.client import Client
    from tmover.scheduler.slurm.client import SlurmClient
    from tmover.scheduler.slurm.commands import NodeDetail

Say = Callable[[News], object]


@click.command(name="drain")
@click.argument("nodes", type=hostlist, nargs=-1, required=True, metavar="NODE...")
@click.option(
    "--reason", type=Text(), required=True, help="Shown by `sinfo -R`, kept in the journal."
)
@click.option(
    "--wait",
    "wait_s",
    type=duration,
    default="10m",
    show_default=True,
    help="How long to wait until the nodes are left. What was asked stays asked after that.",
)
@click.option("--no-move", is_flag=True, help="Only drain; jobs stay where they are.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@state_option
def command(
    *,
    nodes: tuple[tuple[str, ...], ...],
    reason: str,
    wait_s: float,
    no_move: bool,
    as_json: bool,
    state: pathlib.Path | None,
) -> None:
    """Drain each NODE in Slurm, and move the ranks of tmover's jobs off it.

    NODE may be a hostlist such as node[1-4]. `tmover undrain` takes it back into service. Without
    the right to drain, the ranks are moved all the same, and it is said what an administrator must
    do.

    Exit codes: 0 all nodes are drained or left, 1 a move was aborted or not done in time, 3 a node
    is neither drained nor left, 4 no controller answers.
    """
    from tmover.config import load, state_directory
    from tmover.controller.client import Client
    from tmover.scheduler.slurm import drains
    from tmover.scheduler.slurm.client import SlurmClient

    def say(news: News) -> None:
        click.echo(json.dumps(news._asdict()) if as_json else plain(str(news)))

    names = flat(nodes)
    mark = drains.reason_of(drains.new_id(), reason)
    configuration = load()
    drained = drain(SlurmClient(timeout_s=configuration.slurm.command_s), names, mark, say)
    moved = Moved(frozenset(), is_whole=True)
    if not no_move:
        with Client(state_directory(state)) as client:
            request_s = configuration.controller.request_s
            moved = move(client, names, mark, say, request_s=request_s, wait_s=wait_s)
    untouched = set(names) - drained - moved.nodes
    sys.exit((3 if untouched else 0) if moved.is_whole else 1)


def drain(slurm: SlurmClient, names: Sequence[str], mark: str, say: Say) -> set[str]:
    """Drain the nodes as far as that can be; return those that are drained now."""
    from tmover.errors import ConfigError, SchedulerError

    try:
        known = {node.name: node for node in slurm.nodes()}
    except SchedulerError as error:
        say(News("not drained", f"{', '.join(names)}: {error}"))
        return set()
    strange = [name for name in names if name not in known]
    if strange:
        msg = f"Slurm knows no node {', '.join(strange)}"
        raise ConfigError(msg)
    return {name for name in names if _drain_one(slurm, known[name], mark, say)}


def _drain_one(slurm: SlurmClient, node: NodeDetail, mark: str, say: Say) -> bool:
    from tmover.errors import SchedulerError, SlurmDenied
    from tmover.scheduler.interface import NodeState

    if node.state in (NodeState.DRAINING, NodeState.DRAINED):
        say(News("drained", f"{node.name} was so before: {node.reason}"))
        return True
    try:
        slurm.drain(node.name, mark)
    except SlurmDenied as error:
        line = f"scontrol update NodeName={node.name} State=DRAIN Reason={shlex.quote(mark)}"
        say(News("not drained", f"{node.name}: {error}; an administrator can: {line}"))
        return False
    except SchedulerError as error:
        say(News("not drained", f"{node.name}: {error}"))
        return False
    say(News("drained", f"{node.name}: {mark}"))
    return True


class Moved(NamedTuple):
    """What came of the moves."""

    nodes: frozenset[str]
    """Nodes that a job was on and is on no more."""
    is_whole: bool
    """Whether no move was aborted."""


def move(
    client: Client,
    names: Sequence[str],
    reason: str,
    say: Say,
    *,
    request_s: float,
    wait_s: float,
) -> Moved:
    """Have the nodes left by all jobs, saying what happens until that is done."""
    from tmover.cli.moving import follow, leave, live_jobs

    asked: dict[str, list[str]] = {}
    for job in live_jobs(client, request_s):
        standbys = {one.node for one in job.standbys}
        nodes = sorted(
            (name for name in names if name in job.nodes), key=lambda n: n not in standbys
        )
        accepted = leave(client, job.job, nodes, reason, request_s) if nodes else None
        if accepted is not None:
            asked[job.job] = nodes
            say(News("requested", f"job {job.job}: {accepted.text}"))
    if not asked:
        say(News("done", f"no job of tmover is on {', '.join(names)}"))
    several = len(asked) > 1

    def tell(job: str, news: News) -> None:
        say(News(news.phase, f"job {job}: {news.text}") if several else news)

    failed = follow(client, asked, tell, request_s=request_s, wait_s=wait_s)
    stuck = {node for nodes in failed.values() for node in nodes}
    left = {node for nodes in asked.values() for node in nodes} - stuck
    return Moved(frozenset(left), is_whole=not stuck)
