"""Where a rank stands in its data."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class Position(msgspec.Struct, frozen=True, array_like=True):
    """The next batch: number `batch` of pass `pass_` through the data.

    A `batch` past the end of its pass means the first of the next one.
    """

    pass_: int
    batch: int
    seed: int
    """What the rank's sampler is seeded with, so that a joiner draws the same order."""
    state: bytes = b""
    """Where the data itself says that it stands, if it does: what a joiner loads into it."""
    shares: int = 0
    """Among how many ranks, or groups of ranks that read the same, the samples of a pass are
    divided; 0 if nobody says."""


class Fetched(NamedTuple):
    """A batch, and where the data stands after it."""

    batch: Any
    after: Position
    indices: list[Any] | None
    """The samples it is made of, if they have numbers."""


def advance(position: Position, state: bytes = b"") -> Position:
    """Return the position one batch further."""
    return Position(position.pass_, position.batch + 1, position.seed, state, position.shares)


def next_pass(position: Position) -> Position:
    """Return the beginning of the pass after `position`."""
    return Position(position.pass_ + 1, 0, position.seed, shares=position.shares)
