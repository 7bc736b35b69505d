"""The documents that are made from the code: `make docs` writes them, the tests compare them."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import click

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLI = ROOT / "docs" / "cli.md"


def cli_reference() -> str:
    """Return `docs/cli.md`: what `--help` says, for every command."""
    from tmover.cli.main import tmover

    parts = [
        "# Commands\n\nMade by `make docs` from `--help`.\n",
        *(f"## {name}\n\n```text\n{text}\n```\n" for name, text in _pages(tmover)),
    ]
    return "\n".join(parts)


def _pages(group: click.Group) -> Iterator[tuple[str, str]]:
    settings = {**group.context_settings, "terminal_width": 100, "max_content_width": 100}
    parent = click.Context(group, info_name="tmover", **settings)
    yield "tmover", _help(parent)
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command is not None
        yield f"tmover {name}", _help(click.Context(command, parent=parent, info_name=name))


def _help(context: click.Context) -> str:
    return re.sub(r"[ \t]+$", "", context.get_help(), flags=re.MULTILINE)


def main() -> None:
    CLI.write_text(cli_reference())


if __name__ == "__main__":
    main()
