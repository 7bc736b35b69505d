"""`tmover cancel`: end a job."""

from __future__ import annotations

import pathlib

import click

from tmover.cli.state import state_option
from tmover.cli.text import Text, plain


@click.command(name="cancel")
@click.argument("job", type=Text(), required=False)
@click.option(
    "--reason",
    type=Text(),
    default="cancelled by hand",
    show_default=True,
    help="Kept in the journal.",
)
@state_option
def command(*, job: str | None, reason: str, state: pathlib.Path | None) -> None:
    """End JOB now, on all its nodes. Without JOB, the only one that runs."""
    from tmover import wire
    from tmover.config import load, state_directory
    from tmover.controller.client import ask

    request = wire.CancelRequest(job=job, reason=reason)
    answer = ask(state_directory(state), request, load().controller.request_s)
    if isinstance(answer, wire.Accepted):
        click.echo(plain(answer.text))
