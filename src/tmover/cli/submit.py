"""`tmover submit`: start a job."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import click

from tmover.cli.number import Number
from tmover.cli.run import check_script
from tmover.cli.state import state_option
from tmover.cli.text import Text
from tmover.cli.words import is_local, take_apart
from tmover.errors import ConfigError

if TYPE_CHECKING:
    from tmover.cli.batch import BatchJob

_SBATCH = "tmover.sbatch"
"""Where click's context keeps the options that are for sbatch."""


class _Submit(click.Command):
    """Takes sbatch's options out before click reads the others."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        if not is_local(args):
            words = take_apart(args)
            ctx.meta[_SBATCH] = words.sbatch
            named = [] if words.script is None else [words.script]
            args = [*words.own, "--", *named, *words.arguments]
        return super().parse_args(ctx, args)


@click.command(name="submit", cls=_Submit, options_metavar="[OPTIONS]")
@click.option(
    "--standby",
    type=Number(0),
    metavar="K",
    help="Nodes that stand by. [default: count in the table [standby], 0]",
)
@click.option(
    "--pool",
    type=Text(),
    metavar="NAME",
    help="Share standbys with your jobs of the same NAME. [default: pool in the table [standby]]",
)
@click.option(
    "--resume", is_flag=True, help="Go on from the newest checkpoint of `session.checkpoint`."
)
@click.option("--headless", is_flag=True, help="Hold the nodes with salloc, without a batch host.")
@click.option("--dry-run", is_flag=True, help="Show every command and script, and do nothing.")
@click.option("--unchecked", is_flag=True, help="Do not look for `tmover run` in SCRIPT.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@click.option("--local", is_flag=True, help="On this machine: nodes are groups of processes.")
@click.option(
    "--nodes",
    type=Number(1),
    default=1,
    show_default=True,
    help="Nodes of the job. Without --local, it is sbatch's.",
)
@click.option(
    "--nproc-per-node",
    default="1",
    show_default=True,
    metavar="N",
    help="Ranks per node. With --local only.",
)
@click.option(
    "-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`. With --local only."
)
@click.option("--detach", is_flag=True, help="Return at once; the job goes on. With --local only.")
@click.option("--config", type=click.Path(path_type=pathlib.Path), help="Configuration file.")
@state_option
@click.argument("script", type=Text(), required=False)
@click.argument("arguments", nargs=-1, type=Text(), metavar="[ARGS]...")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    standby: int | None,
    pool: str | None,
    resume: bool,
    headless: bool,
    dry_run: bool,
    unchecked: bool,
    as_json: bool,
    local: bool,
    nodes: int,
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
    tmover submit train.sbatch --nodes=4 --standby 1 -- --lr 3e-4
    tmover submit --local --nodes 4 --standby 1 -- train.py --lr 3e-4

    SCRIPT is a batch script of Slurm in which `srun tmover run` starts the training. All options of
    sbatch can be given. A controller is started if none runs on the state directory, which the
    nodes must see, too. The job goes on by itself; `tmover cancel` ends it, standbys included.

    With --local, SCRIPT is a Python script. What happens is shown until the job ends, and the exit
    code is the job's. Ctrl-C cancels the job; `--detach` leaves it running.
    """  # noqa: D301 - click keeps the lines of a paragraph after a backspace
    from tmover.config import load

    configuration = load(config)
    shared = configuration.standby.pool if pool is None else pool
    if local:
        if headless or dry_run or unchecked or as_json:
            msg = "--headless, --dry-run, --unchecked and --json are for jobs of Slurm"
            raise ConfigError(msg)
        from tmover.cli import local as here

        checked = check_script(script, module=module, command="submit")
        spec = here.job_spec(
            nodes,
            standby or 0,
            nproc_per_node,
            checked,
            *arguments,
            module=module,
            resume=resume,
            pool=shared,
            refill=True,
        )
        here.run(spec, configuration, state, config=config, detach=detach)
        return
    if script is None:
        msg = "no script given; see `tmover submit --help`"
        raise ConfigError(msg)
    from tmover.cli import batch

    job = batch.describe(
        pathlib.Path(script),
        arguments,
        ctx.meta.get(_SBATCH, ()),
        configuration,
        standby=standby,
        pool=shared,
        headless=headless,
        state=state,
        config=config,
        resume=resume,
    )
    batch.check(job, unchecked=unchecked)
    if dry_run:
        batch.show(job, as_json=as_json)
    else:
        _submit(job, as_json=as_json)


def _submit(job: BatchJob, *, as_json: bool) -> None:
    from tmover.cli.submission import submit  # speaks to the controller, so not for a dry run

    submit(job, as_json=as_json)
