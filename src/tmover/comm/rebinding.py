"""Whose place a process takes in its groups when it becomes another rank.

All ranks make the same groups in the same order, and each is in some of them. The groups of the
rank it was stand for those of the rank it becomes, the first for the first and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tmover.errors import StateError


class Membership(NamedTuple):
    """A group that the script has made, whether or not this process is in it."""

    name: str
    """What torch calls it here."""
    ranks: tuple[int, ...]
    wire_name: str


def counterparts(
    made: Sequence[Membership], own: int, other: int
) -> list[tuple[Membership, Membership]]:
    """Return each group of rank `own` with that of rank `other` that takes its place.

    Raises `StateError` if the one has other groups than the other: then the script has built
    something else here than it would have as `other`.

    >>> rows = [Membership("1", (0, 1), "1"), Membership("2", (2, 3), "2")]
    >>> columns = [Membership("3", (0, 2), "3"), Membership("4", (1, 3), "4")]
    >>> [(a.name, b.name) for a, b in counterparts(rows + columns, 0, 3)]
    [('1', '2'), ('3', '4')]
    >>> counterparts(rows + [Membership("3", (0, 2), "3")], 0, 3)
    Traceback (most recent call last):
    tmover.errors.StateError: rank 0 cannot become rank 3: it is in groups of 2, 2 ranks, not of 2
    """
    mine = [group for group in made if own in group.ranks]
    theirs = [group for group in made if other in group.ranks]
    sizes, wanted = ([len(group.ranks) for group in groups] for groups in (mine, theirs))
    if sizes != wanted:
        here, there = (", ".join(map(str, found)) or "0" for found in (sizes, wanted))
        msg = (
            f"rank {own} cannot become rank {other}: it is in groups of {here} ranks, not of "
            f"{there}"
        )
        raise StateError(msg)
    return list(zip(mine, theirs, strict=True))
