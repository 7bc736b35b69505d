"""`tmover init`: what a controller needs, made beforehand; and new keys."""

from __future__ import annotations

import json
import os
import pathlib
import socket
from typing import NamedTuple

import click

from tmover.cli.state import state_option
from tmover.cli.text import plain

_SITE_STATE = "/var/lib/tmover"
_PORT = 5599
_HEAD_FILE = "controller.toml"
_SHOWN = "conf/tmover.toml shows every key with its default."


class Report(NamedTuple):
    """What was found and made, and what is to be done by hand."""

    state: pathlib.Path
    made: list[str]
    kept: list[str]
    next: list[str]


@click.command(name="init")
@click.option(
    "--site",
    is_flag=True,
    help="For the whole cluster, as root: the configuration of all machines, and of the head node.",
)
@click.option(
    "--rotate-keys",
    is_flag=True,
    help="Have the controller make new keys when it is started next. Jobs go on.",
)
@click.option(
    "--config",
    type=click.Path(path_type=pathlib.Path, dir_okay=False),
    help="The configuration file to make. [default: ~/.config/tmover/tmover.toml; with --site "
    "/etc/tmover/tmover.toml]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@state_option
def command(
    *,
    site: bool,
    rotate_keys: bool,
    config: pathlib.Path | None,
    as_json: bool,
    state: pathlib.Path | None,
) -> None:
    """Make the state directory, keys and a configuration file; what is there stays as it is.

    Nothing of this is needed before `tmover submit`: a user's controller makes what it needs.
    """
    from tmover.config import load, own_file, state_directory
    from tmover.controller import keys
    from tmover.errors import ConfigError
    from tmover.owner import is_anothers

    if site and os.geteuid() != 0:
        msg = "--site is for root: it makes the cluster's controller's files"
        raise ConfigError(msg)
    configuration = load()
    if site and state is None and not configuration.controller.state:
        state = pathlib.Path(_SITE_STATE)
    directory = state_directory(state, configuration=configuration)
    if is_anothers(directory):
        msg = (
            f"{directory} is for the cluster's controller, which serves you: there is nothing to "
            "make; name a directory of your own with --state for a controller of your own"
        )
        raise ConfigError(msg)
    report = Report(directory, [], [], [])
    _note(report, directory, is_there=directory.exists())
    keys.private_directory(directory)
    is_there = (directory / "keys" / "server.key").exists()
    if rotate_keys:
        keys.ask_to_rotate(directory)
        report.made.append(f"{directory / 'keys' / 'rotate'}: new keys are asked for")
    else:
        keys.make(directory)
        _note(report, directory / "keys", is_there=is_there)
    if site:
        _write_site(report, config)
    elif not rotate_keys or config is not None:
        _write(report, config or own_file(), _head(directory) + _all_keys())
    _advise(report, site=site, rotate=rotate_keys)
    _show(report, as_json=as_json)


def _write_site(report: Report, config: pathlib.Path | None) -> None:
    """Write the file of all machines, and beside it the head node's."""
    from tmover.config import SITE_FILE

    path = config or SITE_FILE
    state = f"[controller]\nstate = {json.dumps(str(report.state))}\n"
    _write(report, path, f"# On all machines. {_SHOWN}\n\n{state}")
    bind = json.dumps(f"tcp://{socket.getfqdn()}:{_PORT}")
    head = (
        f"# On the head node alone, for the controller. {_SHOWN}\n\n{state}"
        f"# An address that nodes can reach.\nbind = {bind}\n"
        '# "munge" needs munged; with "files" name the users.\nidentity = "auto"\nusers = []\n'
    )
    _write(report, path.with_name(_HEAD_FILE), head)


def _head(state: pathlib.Path) -> str:
    return (
        f"# For your own controller, agents and commands; the state directory is {state}.\n"
        "# Every key with its default: take the # away from what is to differ.\n"
    )


def _all_keys() -> str:
    """Return all tables with all keys, none of them in force."""
    import msgspec

    from tmover.config import Config

    parts = []
    for table, keys in msgspec.to_builtins(Config()).items():
        lines = [f"# {key} = {json.dumps(value)}" for key, value in keys.items()]
        parts.append("\n".join([f"\n[{table}]", *lines, ""]))
    return "".join(parts)


def _write(report: Report, path: pathlib.Path, text: str) -> None:
    """Write a file that all may read, unless it is there."""
    from tmover.errors import ConfigError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text)
        path.chmod(0o644)
    except FileExistsError:
        _note(report, path, is_there=True)
    except OSError as error:
        msg = f"cannot write {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(msg) from error
    else:
        _note(report, path, is_there=False)


def _note(report: Report, path: pathlib.Path, *, is_there: bool) -> None:
    (report.kept if is_there else report.made).append(str(path))


def _advise(report: Report, *, site: bool, rotate: bool) -> None:
    """Say what is to be done next."""
    if rotate:
        how = "systemctl restart tmover" if site else "end it, and start it as before"
        report.next.append(f"start the controller anew for its new keys to be made: {how}")
        report.next.append("jobs go on: agents and commands find the new keys by themselves")
    elif site:
        report.next.append("copy the file of all machines to all machines")
        report.next.append("set bind in the head node's file to an address that nodes can reach")
        report.next.append("install conf/tmover.service, then: systemctl enable --now tmover")
    else:
        report.next.append("tmover submit SCRIPT.sbatch")


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        shown = {**report._asdict(), "state": str(report.state)}
        click.echo(json.dumps(shown))
        return
    for what, paths in (("made", report.made), ("kept", report.kept), ("next", report.next)):
        for line in paths:
            click.echo(plain(f"{what}  {line}"))
