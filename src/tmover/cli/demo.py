"""`tmover demo`: see a job survive, and what it would have cost otherwise."""

from __future__ import annotations

import pathlib
import sys

import click

from tmover.cli.number import Number


@click.command(name="demo")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=pathlib.Path, dir_okay=False, writable=True),
    help="Write what was measured to FILE.",
    metavar="FILE",
)
@click.option(
    "--steps",
    type=Number(300),
    default=360,
    show_default=True,
    help="Steps of the job, the same in both runs.",
)
def command(*, json_file: pathlib.Path | None, steps: int) -> None:
    """Train a small GPT on 4 nodes of this machine, with a standby, through two interruptions.

    One node is left as planned; once another standby is warm, the node with rank 0 is killed. The
    same job undisturbed shows that the bits are the same; plain DDP under torchrun, killed the same
    way and started again from its checkpoint, shows what the interruption costs today. Takes under
    four minutes on two cores; Ctrl-C leaves nothing behind.
    """
    from rich.console import Console

    from tmover.cli.ending import end_on_signals
    from tmover.config import load
    from tmover.demo.screen import Screen
    from tmover.demo.show import run
    from tmover.demo.table import render

    end_on_signals()
    with Screen(Console()) as screen:
        report = run(screen, load(), steps=steps)
        screen.table(render(report))
    if json_file is not None:
        json_file.write_bytes(report.to_json())
    if not report.equal or report.samples.lost or report.samples.repeated:
        sys.exit(1)
