"""`tmover verify`: the same script with and without losses, compared bit by bit."""

from __future__ import annotations

import pathlib
import random
import sys
from typing import TYPE_CHECKING

import click

from tmover.cli.number import Number
from tmover.cli.run import check_script
from tmover.cli.text import Text, plain

if TYPE_CHECKING:
    from tmover.verify.report import Report


@click.command(
    name="verify",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option(
    "--nodes",
    type=Number(2),
    default=2,
    show_default=True,
    help="Nodes of the job, on this machine.",
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    "nproc",
    default="1",
    show_default=True,
    metavar="N",
    help="Ranks per node.",
)
@click.option(
    "--standby",
    type=Number(1),
    default=1,
    show_default=True,
    metavar="K",
    help="Nodes that stand by; as many faults are drawn.",
)
@click.option(
    "--faults",
    "faults",
    multiple=True,
    metavar="SPEC",
    help="A fault to do, such as kill:rank=1,step=7,point=in_vote. May be repeated. "
    "[default: drawn at random]",
)
@click.option("--seed", type=Number(0), help="What faults are drawn from. [default: at random]")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option("--config", type=click.Path(path_type=pathlib.Path), help="Configuration file.")
@click.argument("script", type=Text(), required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def command(
    *,
    nodes: int,
    nproc: str,
    standby: int,
    faults: tuple[str, ...],
    seed: int | None,
    as_json: bool,
    module: bool,
    config: pathlib.Path | None,
    script: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT twice on this machine, once while it loses nodes, and compare each step.

    \b
    tmover verify --nodes 2 train.py --steps 40
    tmover verify --nodes 4 --faults "kill:rank=1,step=7,point=in_vote" train.py

    Compared are parameters, buffers, optimizers, whatever else is tracked, random streams and
    samples, on every rank after every step. If the runs part, it says at which step, in what and on
    which ranks, whether two runs without faults part too, and what usually is behind that.

    SPEC is FAULT:rank=R,step=S,point=P. FAULT is kill, killnode (with its agent), stop (SIGSTOP) or
    cut (its links); P is one of step_open, before_vote, in_vote, after_vote, before_update,
    after_update, after_body, and others that `tmover verify --faults kill:point=` lists.

    The script should be short: some 10 to 100 steps. Exit code 0: equal; 1: not equal.
    """  # noqa: D301 - click keeps the lines of a paragraph after a backspace
    from tmover.cli import local
    from tmover.cli.ending import end_on_signals
    from tmover.config import load
    from tmover.verify.faults import check

    configuration = load(config)
    given = check(faults)
    checked = check_script(script, module=module, command="verify")
    spec = local.job_spec(nodes, standby, nproc, checked, *arguments, module=module)
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    from rich.console import Console

    from tmover.demo.screen import Screen
    from tmover.verify.show import run

    end_on_signals()
    with Screen(Console(stderr=True)) as screen:
        report = run(screen, configuration, local.configured(spec, config), given=given, seed=seed)
    _show(report, as_json=as_json)
    sys.exit(0 if report.verified else 1)


def _show(report: Report, *, as_json: bool) -> None:
    from tmover.verify.report import sentences

    if as_json:
        click.echo(report.to_json())
        return
    for line in sentences(report):
        click.echo(plain(line))
