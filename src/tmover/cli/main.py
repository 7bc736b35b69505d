"""The `tmover` command itself: finds the subcommand, sets up logging, shows errors as one line."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import sys
from typing import Any

import click

from tmover import __version__
from tmover.cli import logs
from tmover.cli.text import plain
from tmover.errors import TmoverError

COMMANDS = (
    "submit", "status", "migrate", "cancel", "wait", "drain", "undrain", "maintenance", "demo",
    "check-loader", "verify", "run", "controller", "init", "journal",
)  # fmt: skip
"""In the order of `tmover --help`. Each is `command` in `tmover.cli.NAME`, loaded when needed."""


def _module(name: str) -> str:
    return f"tmover.cli.{name.replace('-', '_')}"


EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 scheduler, 4 no controller, "
    "130 interrupted. The code that a job's script fails with is passed on."
)

_NOT_WRITTEN = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT)


class Commands(click.Group):
    """Loads subcommands lazily, and shows a `TmoverError` as one line with its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands."""
        del ctx
        return [name for name in COMMANDS if importlib.util.find_spec(_module(name))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one subcommand."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(_module(cmd_name)).command
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command; what was typed wrong is one line, too."""
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except click.UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # not in every click
                click.echo(error.format_message())
                sys.exit(error.exit_code)
            path = "tmover" if error.ctx is None else error.ctx.command_path
            click.secho(f"error: {error.format_message()} See `{path} --help`.", err=True, fg="red")
            sys.exit(error.exit_code)
        except click.ClickException as error:
            click.secho(f"error: {error.format_message()}", err=True, fg="red")
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            sys.exit(130)
        except OSError as error:
            if error.filename is not None or error.errno not in _NOT_WRITTEN:
                raise
            _drop_output()
            why = (error.strerror or str(error)).lower()
            click.secho(f"error: the output could not be written: {why}", err=True, fg="red")
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except TmoverError as error:
            click.secho(f"error: {plain(str(error))}", err=True, fg="red")
            ctx.exit(error.exit_code)


@click.group(
    cls=Commands,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="tmover")
@click.option(
    "--log-level",
    type=click.Choice(logs.LEVELS, case_sensitive=False),
    envvar="TMOVER_LOG",
    default="WARNING",
    show_default=True,
    show_envvar=True,
    help="How much to log to stderr: lines on a terminal, JSON otherwise.",
)
def tmover(log_level: str) -> None:
    """Move the ranks of a running PyTorch job to another node without stopping it.

    On one machine: `tmover submit --local --nodes 4 --standby 1 -- train.py`, then, from another
    terminal, `tmover status` and `tmover migrate node2`.
    """
    logs.set_up(log_level.upper(), sys.stderr)


def _drop_output() -> None:
    """Have what is still to be written go nowhere: Python would complain of it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _open_closed_streams() -> None:
    """Open what of stdin, stdout and stderr is closed: the next file would take its number."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(lowest)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def main() -> None:
    """Run the command line of this process."""
    _open_closed_streams()
    tmover.main(prog_name="tmover")
