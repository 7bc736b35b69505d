"""`tmover controller`: the process that decides."""

from __future__ import annotations

import pathlib
import sys

import click

from tmover.cli.state import state_option


@click.command(name="controller")
@state_option
@click.option(
    "--bind",
    metavar="ADDRESS",
    help="Where agents and commands connect, such as tcp://10.0.0.1:5599; port 0 takes a free one. "
    "[default: bind in the table [controller]]",
)
@click.option("--config", type=click.Path(path_type=pathlib.Path), help="Configuration file.")
def command(*, state: pathlib.Path | None, bind: str | None, config: pathlib.Path | None) -> None:
    """Run the controller in the foreground until SIGTERM or Ctrl-C.

    It makes its keys in the state directory when it is first started, writes down there what it
    decides, and goes on where it was when it is started again: jobs do not notice.
    """
    import msgspec

    from tmover.config import load, state_directory
    from tmover.controller.client import Address
    from tmover.controller.daemon import run
    from tmover.controller.keys import private_directory
    from tmover.errors import ConfigError
    from tmover.owner import is_anothers
    from tmover.scheduler.local import LocalScheduler
    from tmover.scheduler.slurm.allocations import slurm_allocations

    configuration = load(config)
    if bind is not None:
        table = msgspec.structs.replace(configuration.controller, bind=bind)
        configuration = msgspec.structs.replace(configuration, controller=table)
    directory = state_directory(state, configuration=configuration)
    if is_anothers(directory):
        msg = (
            f"{directory} is for the cluster's controller, which its administrator starts; "
            "name a directory of your own with --state"
        )
        raise ConfigError(msg)
    private_directory(directory)
    scheduler = LocalScheduler(directory / "cluster", capacity=configuration.local.nodes)

    def ready(address: Address) -> None:
        click.echo(f"tmover: controller of {directory} listens on {address.address}", err=True)

    allocations = slurm_allocations(directory, configuration)
    try:
        sys.exit(run(configuration, directory, scheduler, allocations, on_ready=ready))
    finally:
        if scheduler.is_gone():  # nobody else can find the standbys that were ordered
            scheduler.end_launched()
