"""Roles: sets of slots whose ranks build the same, so that a standby warm for one fits them all.

Two slots have one role if their ranks, local rank by local rank, track the same things, in the same
process groups and pipeline stages, under the same `session.role`: in a pipeline with replicas the
slots of one stage. A standby rehearses each role once and rests in the commonest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Schema = Mapping[str, str]
Roles = tuple[tuple[int, ...], ...]
"""The slots of each role, in the order of their first slots."""


def found(schemas: Mapping[int, Schema], nproc: int) -> Roles:
    """Return the roles of a job whose ranks track these things, digest by name.

    >>> found({0: {"a": "x"}, 1: {"a": "y"}, 2: {"a": "x"}}, 1)
    ((0, 2), (1,))
    """
    by_look: dict[tuple[tuple[tuple[str, str], ...], ...], list[int]] = {}
    for slot in range(len(schemas) // max(1, nproc)):
        ranks = range(slot * nproc, (slot + 1) * nproc)
        look = tuple(tuple(sorted(schemas[rank].items())) for rank in ranks)
        by_look.setdefault(look, []).append(slot)
    return tuple(tuple(slots) for slots in by_look.values())


def role_of(roles: Roles, slot: int) -> int | None:
    """Return the number of the role that has this slot, None if none is known to."""
    return next((number for number, slots in enumerate(roles) if slot in slots), None)


def unvisited(roles: Roles, visited: Collection[int]) -> list[int]:
    """Return the roles that a standby has yet to rehearse: the first, the last, then the others.

    >>> unvisited(((0,), (1,), (2,), (3,)), {0})
    [3, 1, 2]
    """
    numbers = range(len(roles))
    order = dict.fromkeys([*numbers[:1], *numbers[-1:], *numbers])
    return [number for number in order if number not in visited]


def resting(roles: Roles, present: int) -> int:
    """Return the role in which a standby rests: the commonest, at a tie the one it is in.

    >>> resting(((0,), (1, 2)), 0), resting(((0,), (1,)), 1)
    (1, 1)
    """
    return max(range(len(roles)), key=lambda number: (len(roles[number]), number == present))


def companion(slots: Sequence[int], slot: int) -> int | None:
    """Return the slot of the role in which it is proven whether one rank can become another.

    It is the next one, as ranks side by side differ in most of what scripts derive from a rank.

    >>> companion((0, 2, 4), 4), companion((3,), 3)
    (0, None)
    """
    if len(slots) < 2:
        return None
    return slots[(slots.index(slot) + 1) % len(slots)]
