"""The words of `tmover submit SCRIPT`: which are tmover's, sbatch's, and the script's own.

sbatch's options may stand before or after the script, mixed with tmover's. What follows the first
word that is neither, or a `--`, is for the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tmover.errors import ConfigError
from tmover.scheduler.slurm.options import Option, Takes, sbatch

_OWN = {
    "standby": Takes.VALUE,
    "pool": Takes.VALUE,
    "resume": Takes.NOTHING,
    "headless": Takes.NOTHING,
    "dry-run": Takes.NOTHING,
    "unchecked": Takes.NOTHING,
    "json": Takes.NOTHING,
    "state": Takes.VALUE,
    "config": Takes.VALUE,
}
_LOCAL = {
    "detach": "a job of Slurm never holds its terminal; leave it out",
    "nproc-per-node": "say it in the script: `tmover run --nproc-per-node=N`",
    "module": "a batch script is submitted, and it runs modules: `tmover run -m NAME`",
}
"""Options that make sense with `--local` only."""

_GRAMMAR = sbatch.extended(
    "tmover submit", {**_OWN, "detach": Takes.NOTHING, "nproc-per-node": Takes.VALUE,
                      "module": Takes.NOTHING}
)  # fmt: skip


class Words(NamedTuple):
    """A command line, taken apart."""

    own: tuple[str, ...]
    """Options of tmover."""
    sbatch: tuple[Option, ...]
    script: str | None
    arguments: tuple[str, ...]


def is_local(words: Sequence[str]) -> bool:
    """Return whether the words are for `--local`, or ask for help."""
    before = words[: words.index("--")] if "--" in words else words
    return not words or not {"--local", "--help", "-h"}.isdisjoint(before)


def take_apart(words: Sequence[str]) -> Words:
    """Return whose each word is. Raises `ConfigError`."""
    options, count = _GRAMMAR.read(words)
    rest = list(words[count:])
    script = rest.pop(0) if rest else None
    is_ended = count > 0 and words[count - 1] == "--"
    if script is not None and not is_ended:
        more, count = _GRAMMAR.read(rest)
        options, rest = [*options, *more], rest[count:]
    if ":" in rest[:1]:
        msg = "a heterogeneous job (`:` between two groups of options) cannot be moved"
        raise ConfigError(msg)
    for option in options:
        if option.name in _LOCAL:
            msg = f"--{option.name} is for --local: {_LOCAL[option.name]}"
            raise ConfigError(msg)
    return Words(
        own=tuple(str(option) for option in options if option.name in _OWN),
        sbatch=tuple(option for option in options if option.name not in _OWN),
        script=script,
        arguments=tuple(rest),
    )
