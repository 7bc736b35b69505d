"""`tmover migrate`: move the ranks of a node to a standby."""

from __future__ import annotations

import json
import pathlib
import sys
import time

import click

from tmover.cli.duration import duration
from tmover.cli.state import state_option
from tmover.cli.text import Text, plain

_POLL_S = 0.1


@click.command(name="migrate")
@click.argument("node", type=Text())
@click.option(
    "--job", type=Text(), metavar="JOB", help="The job to move; needed if several jobs run."
)
@click.option(
    "--reason",
    type=Text(),
    default="asked for by hand",
    show_default=True,
    help="Kept in the journal.",
)
@click.option(
    "--wait",
    "wait_s",
    type=duration,
    default="10m",
    show_default=True,
    help="How long to wait until it is done. What was asked stays asked after that.",
)
@click.option("--no-wait", is_flag=True, help="Return as soon as the controller has accepted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@state_option
def command(
    *,
    node: str,
    job: str | None,
    reason: str,
    wait_s: float,
    no_wait: bool,
    as_json: bool,
    state: pathlib.Path | None,
) -> None:
    """Move the ranks of NODE to a standby, training going on until the switch.

    Prints what the move is doing until it is done (exit code 0), or aborted or not done in time
    (1), and why. An aborted move costs the job nothing.
    """
    from tmover import wire
    from tmover.cli.moving import late
    from tmover.cli.watch import MoveWatch, News
    from tmover.config import load, state_directory
    from tmover.controller.client import Client

    def say(news: News) -> None:
        click.echo(json.dumps(news._asdict()) if as_json else plain(str(news)))

    request_s = load().controller.request_s
    with Client(state_directory(state)) as client:
        accepted = client.request(wire.MoveRequest(job=job, node=node, reason=reason), request_s)
        if not isinstance(accepted, wire.Accepted):
            return
        say(News("requested", accepted.text))
        watch: MoveWatch | None = None
        until = time.monotonic() + wait_s
        while not no_wait:
            answer = client.request(wire.StatusRequest(job=accepted.job), request_s)
            if isinstance(answer, wire.StatusReply):
                watch = watch or MoveWatch(node, answer.jobs[0])
                for news in watch.look(answer.jobs[0]):
                    say(news)
                if watch.is_over:
                    sys.exit(0 if watch.is_done else 1)
            if time.monotonic() >= until:
                say(late(wait_s))
                sys.exit(1)
            time.sleep(_POLL_S)
