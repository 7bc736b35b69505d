"""Slurm's hostlists: `node[1-4,7]` for node1, node2, node3, node4, node7.

>>> expand("node[1-3,7],login")
['node1', 'node2', 'node3', 'node7', 'login']
>>> fold(["node7", "node1", "node2", "node3"])
'node[1-3,7]'
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from tmover.errors import ConfigError

MAX_HOSTS = 100_000
"""A hostlist that stands for more names than this is refused."""

_PART = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9,-]*\])+")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})")


def expand(text: str) -> list[str]:
    """Return the names `text` stands for, in its order. Raises `ConfigError` naming what is wrong.

    >>> expand("rack[1-2]n[01-02]")
    ['rack1n01', 'rack1n02', 'rack2n01', 'rack2n02']
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text) if text else []:
        if not _PART.fullmatch(part):
            msg = f"hostlist {text!r}: cannot read {part!r}; write names such as node[1-4,7]"
            raise ConfigError(msg)
        choices = [_choices(piece, text) for piece in _PIECE.finditer(part)]
        if len(names) + math.prod(len(choice) for choice in choices) > MAX_HOSTS:
            raise _too_many(text)
        names.extend("".join(chosen) for chosen in itertools.product(*choices))
    return names


def fold(names: Iterable[str]) -> str:
    """Return the hostlist of `names`, sorted, each name once.

    >>> fold(["n09", "n10", "n1", "login", "n100"])
    'login,n[1,100],n[09-10]'
    """
    split = [_NUMBERED.fullmatch(name) or name for name in set(names)]
    matches = [match for match in split if isinstance(match, re.Match)]
    padded = {(m[1], len(m[2])) for m in matches if _is_padded(m[2])}
    groups: dict[tuple[str, int], list[int]] = {}
    for match in matches:
        prefix, digits = match[1], match[2]
        width = len(digits) if (prefix, len(digits)) in padded else 0
        groups.setdefault((prefix, width), []).append(int(digits))
    parts = [(name, 0, name) for name in split if isinstance(name, str)]
    for (prefix, width), numbers in groups.items():
        parts.append((prefix, width, prefix + _ranges(sorted(numbers), width)))
    return ",".join(part for _, _, part in sorted(parts))


def natural(name: str) -> tuple[str, int, str]:
    """Return a sort key that puts node10 after node9."""
    match = _NUMBERED.fullmatch(name)
    return (name, -1, "") if match is None else (match[1], int(match[2]), match[2])


def _choices(piece: re.Match[str], text: str) -> list[str]:
    """Return what one bracket, or the text between two, may stand for."""
    if piece[1] is None:
        return [piece[2]]
    return list(itertools.chain.from_iterable(_numbers(r, text) for r in piece[1].split(",")))


def _numbers(text: str, whole: str) -> Iterator[str]:
    match = _RANGE.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        msg = f"hostlist {whole!r}: {text!r} is not a range; write for example 1-4"
        raise ConfigError(msg)
    first, last = int(match[1]), int(match[2] or match[1])
    if last - first >= MAX_HOSTS:
        raise _too_many(whole)
    width = len(match[1]) if _is_padded(match[1]) else 0
    return (f"{number:0{width}d}" for number in range(first, last + 1))


def _ranges(numbers: Sequence[int], width: int) -> str:
    """Return sorted `numbers` as a bracket, or as a bare number if there is one only."""
    ranges: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        ends = dict.fromkeys((members[0], members[-1]))
        ranges.append("-".join(f"{number:0{width}d}" for number in ends))
    return ranges[0] if len(numbers) == 1 else f"[{','.join(ranges)}]"


def _is_padded(digits: str) -> bool:
    return digits.startswith("0") and len(digits) > 1


def _too_many(text: str) -> ConfigError:
    msg = f"hostlist {text[:60]!r} stands for more than {MAX_HOSTS} names"
    return ConfigError(msg)
