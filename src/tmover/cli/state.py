"""The `--state` option that most commands share."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., object])


def state_option(function: Function) -> Function:
    """Add `--state DIR`; the function gets `state`, a path or None."""
    return click.option(
        "--state",
        type=click.Path(path_type=pathlib.Path, file_okay=False),
        help="The controller's directory. [default: $TMOVER_STATE, or tmover in $XDG_STATE_HOME or "
        "~/.local/state]",
    )(function)
