"""`tmover journal`: what was decided from, for people. It reads, and changes nothing."""

from __future__ import annotations

import pathlib
import sys
import time

import click

from tmover.cli.number import Number
from tmover.cli.state import state_option
from tmover.cli.text import Text, plain


@click.group(name="journal")
def command() -> None:
    """Read the journals of jobs. A controller may run meanwhile.

    For whoever runs the controller; of a cluster's, that is root.
    """


def _json(function: click.decorators.FC) -> click.decorators.FC:
    return click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")(
        function
    )


@command.command(name="show")
@click.argument("job", type=Text())
@_json
@state_option
def show(*, job: str, as_json: bool, state: pathlib.Path | None) -> None:
    """Show what has happened to JOB, one line each: number, time, event, and what it says.

    Of the lines that a snapshot has taken the place of, those before the last one are kept. JOB may
    be Slurm's id.
    """
    import msgspec

    from tmover.cli.telling import told
    from tmover.config import state_directory
    from tmover.controller.archive import Archive

    archive = Archive(state_directory(state))
    for line in archive.lines(archive.choose(job)):
        if as_json:
            click.echo(msgspec.json.encode({"n": line.number, "entry": line.entry}))
            continue
        kind, text = told(line.entry)
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.entry.at))
        click.echo(plain(f"{line.number:>6}  {at}  {kind:<16}  {text}"))


@command.command(name="verify")
@click.argument("job", type=Text(), required=False)
@_json
@state_option
def verify(*, job: str | None, as_json: bool, state: pathlib.Path | None) -> None:
    """Read every line of all journals, or of JOB's, and make each job of them.

    Names the first line of each that is damaged, and the way out. A last line without its end is
    what a crash leaves, or one that is being written: a controller that starts drops it.

    Exit codes: 0 all are whole, 1 some are damaged.
    """
    import msgspec

    from tmover.config import state_directory
    from tmover.controller.archive import Archive
    from tmover.errors import JournalError

    archive = Archive(state_directory(state))
    is_whole = True
    for name in archive.jobs() if job is None else [archive.choose(job)]:
        try:
            readers, said = archive.verify(name), ""
        except JournalError as error:
            readers, said, is_whole = [], str(error), False
        lines = sum(reader.place for reader in readers)
        torn = any(reader.is_torn for reader in readers)
        if as_json:
            found = {"job": name, "lines": lines, "torn": torn, "damage": said}
            click.echo(msgspec.json.encode(found))
        elif said:
            click.echo(plain(f"job {name}: {said}"))
        else:
            end = ", and a last one without its end" if torn else ""
            click.echo(f"job {name}: {lines} lines, all whole{end}")
    sys.exit(0 if is_whole else 1)


@command.command(name="replay")
@click.argument("job", type=Text())
@click.option("--until", type=Number(1), metavar="N", help="As it was after line N.")
@_json
@state_option
def replay(*, job: str, until: int | None, as_json: bool, state: pathlib.Path | None) -> None:
    """Show what JOB is, or was after line N: its nodes, its phase, and what the scheduler owes it.

    As `tmover status` does, but for what only a controller knows that runs.
    """
    import msgspec

    from tmover.cli.status import render
    from tmover.cli.telling import owed
    from tmover.config import state_directory
    from tmover.controller.archive import Archive
    from tmover.errors import ConfigError

    archive = Archive(state_directory(state))
    name = archive.choose(job)
    ledger, number = archive.ledger(name, until)
    if ledger is None:
        msg = f"the journal of job {name} has no job after line {number}"
        raise ConfigError(msg)
    status = msgspec.structs.replace(archive.status(ledger), as_of=ledger.at)
    if as_json:
        found = {"n": number, "status": status, "owed": ledger.effects}
        click.echo(msgspec.json.encode(found))
        return
    click.echo(
        f"after line {number}" + (", the oldest that is kept" if number > (until or number) else "")
    )
    click.echo(render(status))
    if ledger.effects:
        click.echo("\nthe scheduler owes it:")
        for effect in ledger.effects:
            click.echo(plain(f"  {owed(effect)}"))
