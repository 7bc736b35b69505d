"""What a rehearsal is answered from: the outcome of collectives that a rank of the job has seen.

A rank records, once, in the job's first steps; ranks that build the same thing form one *role*, and
the lowest rank of each role records for all of them. What was recorded is found again by position:
the group, by its order among the groups of the rank; the step; the number of the call in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

SETUP = -1
"""The step of what comes before the loop."""
FORMAT = 1


class Key(NamedTuple):
    """The position of a call among those that leave the node."""

    group: int
    """The group's number among those of this rank, in the order in which they were made."""
    step: int
    """Counted from the run's first; `SETUP` before the loop."""
    call: int
    """Its number in that group and step."""


class Heard(NamedTuple):
    """The outcome of a call."""

    op: str
    outs: tuple[Any, ...]
    """The tensors it has written, in order; None in place of one that was left out."""


Tape = Mapping[Key, Heard]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same for a recording to be of use."""

    tmover: str
    torch: str
    nnodes: int
    nproc: int
    schema: dict[str, str] = {}
    """What the rank tracks, and its groups; empty before the loop."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of an outcome."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    """SHA-256 of its bytes, and its name in the store; "" if it was left out."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of one call."""

    group: int
    step: int
    call: int
    op: str
    parts: tuple[Part, ...]

    @property
    def key(self) -> Key:
        """Its position."""
        return Key(self.group, self.step, self.call)


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has recorded."""

    fingerprint: Fingerprint
    rank: int
    ranks: tuple[int, ...]
    """The ranks of its role."""
    steps: int
    answers: tuple[Answer, ...] = ()
    format: int = FORMAT


def misfit(recorded: Fingerprint, own: Fingerprint) -> str:
    """Return why a recording is of no use to who rehearses, "" if it is.

    Before the loop nothing is known of what is tracked.

    >>> made = Fingerprint(tmover="1", torch="2.13.0", nnodes=3, nproc=1, schema={"model": "a"})
    >>> misfit(made, msgspec.structs.replace(made, schema={}))
    ''
    >>> misfit(made, msgspec.structs.replace(made, torch="2.14.1"))
    'it was made with torch 2.13.0, not 2.14.1'
    >>> misfit(made, msgspec.structs.replace(made, nnodes=2))
    'it is of 3 x 1 ranks, not 2 x 1 ranks'
    >>> misfit(made, msgspec.structs.replace(made, schema={"model": "b"}))
    'tracked `model` differs'
    """
    for what in ("tmover", "torch"):
        theirs, ours = getattr(recorded, what), getattr(own, what)
        if theirs != ours:
            return f"it was made with {what} {theirs}, not {ours}"
    layouts = [f"{each.nnodes} x {each.nproc} ranks" for each in (recorded, own)]
    if layouts[0] != layouts[1]:
        return f"it is of {layouts[0]}, not {layouts[1]}"
    if not own.schema:
        return ""
    names = recorded.schema.keys() | own.schema.keys()
    wrong = sorted(n for n in names if recorded.schema.get(n) != own.schema.get(n))
    listed = ", ".join(f"`{name}`" for name in wrong)
    return f"tracked {listed} differ{'s' * (len(wrong) == 1)}" if wrong else ""


def recorders(roles: Sequence[bytes]) -> tuple[int, ...]:
    """Return, by rank, who records for it: the lowest rank of its role.

    >>> recorders([b"first", b"first", b"last", b"last"])
    (0, 0, 2, 2)
    """
    return tuple(map(roles.index, roles))


def biggest(sizes: Mapping[str, int], limit: int) -> frozenset[str]:
    """Return what has to be left out, the biggest first, for the rest to keep within a limit.

    >>> sorted(biggest({"a": 50, "b": 30, "c": 20}, 60))
    ['a']
    """
    total, out = sum(sizes.values()), set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if total <= limit:
            break
        out.add(name)
        total -= sizes[name]
    return frozenset(out)


def crosses(ranks: Iterable[int], nproc: int) -> bool:
    """Return whether these ranks are on more than one node.

    >>> crosses((0, 1), nproc=2), crosses((1, 2), nproc=2)
    (False, True)
    """
    return len({rank // nproc for rank in ranks}) > 1
