"""Nodes as people type them: names, and hostlists such as node[1-4,7]."""

from __future__ import annotations

import click

from tmover.cli.text import Text
from tmover.errors import ConfigError


def hostlist(text: str) -> tuple[str, ...]:
    """Return the names that `text` stands for; the type of an argument.

    >>> hostlist("node[1-2],login")
    ('node1', 'node2', 'login')
    """
    from tmover.scheduler.hostlist import expand

    try:
        names = expand(Text().convert(text, None, None))
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    if not names:
        msg = "no node is named."
        raise click.BadParameter(msg)
    return tuple(names)


def flat(lists: tuple[tuple[str, ...], ...]) -> list[str]:
    """Return the names of several hostlists, each once."""
    return list(dict.fromkeys(name for names in lists for name in names))
