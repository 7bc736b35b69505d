"""The `--state` option that most commands share."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., object])


class _Directory(click.Path):
    """A directory that is there, or is to be. An empty name is a mistake, not the current one."""

    def __init__(self) -> None:
        super().__init__(path_type=pathlib.Path, file_okay=False, readable=False)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """Return the path."""
        if not os.fspath(value):
            self.fail("no directory is named; leave it out for the default.", param, ctx)
        return super().convert(value, param, ctx)


def state_option(function: Function) -> Function:
    """Add `--state DIR`; the function gets `state`, a path or None."""
    return click.option(
        "--state",
        type=_Directory(),
        help="The controller's directory. [default: $TMOVER_STATE, or the cluster's "
        "controller's, or tmover in $XDG_STATE_HOME or ~/.local/state]",
    )(function)
