"""The user's script, run in this process as `python` would run it."""

from __future__ import annotations

import pathlib
import runpy
import sys
from collections.abc import Sequence


def play(argv: Sequence[str]) -> None:
    """Run the script, or after `-m` the module, that `argv` begins with; the rest is for it."""
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        sys.path[0] = str(pathlib.Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")
