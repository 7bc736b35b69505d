"""`tmover maintenance run`: move jobs off nodes before their maintenance begins."""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from tmover.cli.duration import duration
from tmover.cli.hosts import flat, hostlist
from tmover.cli.state import state_option
from tmover.cli.text import plain

if TYPE_CHECKING:
    from tmover.cli.vacating import Report
    from tmover.scheduler.slurm.client import SlurmClient


@click.group(name="maintenance")
def command() -> None:
    """Keep jobs off nodes that are to be worked on."""


@command.command(name="run")
@click.option(
    "--lead",
    "lead_s",
    type=duration,
    default="30m",
    show_default=True,
    help="Leave nodes whose maintenance begins within this time.",
)
@click.option(
    "--wait",
    "wait_s",
    type=duration,
    default="10m",
    show_default=True,
    help="How long to wait until the nodes are left; never beyond the maintenance's beginning.",
)
@click.option(
    "--node", "only", type=hostlist, multiple=True, metavar="HOSTLIST", help="Only these nodes."
)
@click.option("--dry-run", is_flag=True, help="Say what would be left, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@state_option
def run(
    *,
    lead_s: float,
    wait_s: float,
    only: tuple[tuple[str, ...], ...],
    dry_run: bool,
    as_json: bool,
    state: pathlib.Path | None,
) -> None:
    """Move tmover's jobs off nodes that maintenance comes to. Meant for cron.

    Such are the nodes of reservations with the flag MAINT that begin soon or have begun, and those
    that Slurm drains, fails or is to reboot. Says one line per node and job, and nothing if there
    is nothing to do. It may run as often as one likes, and twice at once.

    Exit codes: 0 all nodes are left, 1 some are not, 3 Slurm does not answer, 4 no controller does.
    """
    from tmover.config import load, state_directory
    from tmover.scheduler.slurm.client import SlurmClient

    def say(report: Report) -> None:
        click.echo(report.json() if as_json else plain(str(report)))

    configuration = load()
    done = vacate(
        SlurmClient(timeout_s=configuration.slurm.command_s),
        state_directory(state),
        lead_s=lead_s,
        wait_s=wait_s,
        only=flat(only) or None,
        dry_run=dry_run,
        say=say,
        request_s=configuration.controller.request_s,
    )
    sys.exit(0 if done else 1)


def vacate(
    slurm: SlurmClient,
    state: pathlib.Path,
    *,
    lead_s: float,
    wait_s: float,
    only: list[str] | None,
    dry_run: bool,
    say: Callable[[Report], object],
    request_s: float,
) -> bool:
    """Have what must be left left; return whether it is."""
    from tmover.cli import vacating
    from tmover.cli.moving import live_jobs
    from tmover.controller.client import Client
    from tmover.scheduler.slurm import maintenance

    now = time.time()
    reservations, nodes = slurm.reservations(), slurm.nodes()
    if not maintenance.causes(reservations, nodes, now, lead_s):
        return True
    with Client(state) as client:
        jobs = live_jobs(client, request_s)
        vacates = maintenance.plan(reservations, nodes, jobs, now, lead_s, only)
        refused = [] if dry_run else vacating.request(client, vacates, request_s)
    if dry_run:
        for one in vacates:
            say(vacating.Report(one, "would be left"))
        return True
    for report in refused:
        say(report)
    hopeless = [report.vacate for report in refused]
    watch = vacating.Watch(vacating.looker(state, request_s), wait_s=wait_s)
    done = watch.run([one for one in vacates if one not in hopeless], say)
    return done and not refused
