"""Has jobs run this interpreter and this tmover, also those of users who cannot reach them."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence

_UNUSED = ("site-packages", "test", "include", "share")
"""What jobs do not need of an installed Python; tmover and torch come from elsewhere."""
SOURCE = pathlib.Path(__file__).parents[2] / "src"


def share(directory: pathlib.Path, *, everyone: bool) -> pathlib.Path:
    """Make `python` and `tmover` in `directory/bin`, and return that.

    With `everyone`, other users can run them too: what lies where they cannot go, such as in root's
    home, is linked into `directory` file by file.
    """
    base = pathlib.Path(sys.base_prefix).resolve()
    program = pathlib.Path(sys.executable).resolve().relative_to(base)
    packages = pathlib.Path(sysconfig.get_paths()["purelib"])
    prefix, paths = base, [SOURCE, packages]
    if everyone:
        prefix = _reachable(base, directory / "python", without=_UNUSED)
        paths = [_reachable(p, directory / f"path{n}", without=()) for n, p in enumerate(paths)]
    variables = {"PYTHONPATH": ":".join(str(path) for path in paths)}
    if prefix != base:
        variables["LD_LIBRARY_PATH"] = str(prefix / "lib")
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in variables.items())
    commands = directory / "bin"
    commands.mkdir(exist_ok=True)
    python = shlex.quote(str(prefix / program))
    _write(commands / "python", f'{exports}exec {python} "$@"\n')
    _write(commands / "tmover", f'{exports}exec {python} -m tmover "$@"\n')
    return commands


def _write(path: pathlib.Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)


def _reachable(path: pathlib.Path, link: pathlib.Path, *, without: Sequence[str]) -> pathlib.Path:
    """Return `path` if anyone can read it, or else `link`, with the same files in it."""
    above = [path, *path.parents]
    if path.stat().st_mode & 0o4 and all(each.stat().st_mode & 0o1 for each in above):
        return path
    if not link.exists():
        # links, not a mount: whoever removes the lab must not remove what it was made from
        ignore = shutil.ignore_patterns(*without)
        shutil.copytree(path, link, symlinks=True, copy_function=_link, ignore=ignore)
    return link


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
