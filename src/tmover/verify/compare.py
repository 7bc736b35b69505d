"""Where two runs of one job part: at which step, in what, on which ranks. Pure functions of traces.

A step may have been done several times, by several processes: whichever of them said that it was
committed must have held what the undisturbed run held then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tmover.demo.trace import Line
from tmover.errors import StateError

SAMPLES = "samples"
_FIRST = (SAMPLES, "loader", "random stream")
"""What comes first in a step: the rest follows from it."""


class Place(NamedTuple):
    """A rank after a step."""

    step: int
    rank: int


Held = Mapping[Place, Sequence[Mapping[str, str]]]
"""What was held, by name, each time that a rank committed a step."""


class Parting(NamedTuple):
    """The first step in which two runs are not equal."""

    step: int
    names: dict[str, tuple[int, ...]]
    """What is not equal, what comes first in a step first; and on which ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks on which anything is not equal."""
        return tuple(sorted({rank for ranks in self.names.values() for rank in ranks}))


def held(lines: Iterable[Line]) -> Held:
    """Return what every rank held after every step that it committed.

    A process that is killed may leave one of the two lines of a step: what it did say counts.
    """
    found: dict[Place, list[dict[str, str]]] = defaultdict(list)
    for line in lines:
        if line.step is not None and line.event in ("state", "committed"):
            says = {SAMPLES: repr(line.samples)} if line.event == "committed" else line.digests
            found[Place(line.step, line.rank)].append(dict(says))
    return found


def parting(undisturbed: Sequence[Line], other: Sequence[Line]) -> Parting | None:
    """Return where `other` leaves the undisturbed run for the first time, None if it never does.

    Raises `StateError` if either has ranks or steps that the other has not.
    """
    expected = {place: _merge(found) for place, found in held(undisturbed).items()}
    unequal: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    got = held(other)
    if unknown := got.keys() - expected.keys():
        msg = f"rank {min(unknown).rank} did a step {min(unknown).step} that the first run has not"
        raise StateError(msg)
    for place, times in got.items():
        for name in _unequal(expected[place], times):
            unequal[place.step][name].add(place.rank)
    for rank in _ends_unequal(undisturbed, other):
        unequal[max(expected).step + 1]["everything, at the end"].add(rank)
    if not unequal:
        return None
    step = min(unequal)
    names = sorted(unequal[step], key=_order)
    return Parting(step, {name: tuple(sorted(unequal[step][name])) for name in names})


def equal(undisturbed: Sequence[Line], other: Sequence[Line]) -> bool:
    """Return whether every rank ended with the same bits, and came there by the same steps."""
    return parting(undisturbed, other) is None


def _merge(times: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {name: digest for says in times for name, digest in says.items()}


def _unequal(expected: Mapping[str, str], times: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the names of what was at any time not as expected. A line has only its own names."""
    found = []
    for says in times:
        mine = (SAMPLES,) if SAMPLES in says else tuple(expected.keys() - {SAMPLES})
        names = {**dict.fromkeys(name for name in expected if name in mine), **says}
        found += [name for name in names if says.get(name) != expected.get(name)]
    return found


def _ends_unequal(undisturbed: Iterable[Line], other: Iterable[Line]) -> list[int]:
    """Return the ranks that did not end as they should have, or did not end."""
    expected, got = _ends(undisturbed), _ends(other)
    return sorted(rank for rank in expected if got.get(rank) != expected[rank])


def _ends(lines: Iterable[Line]) -> dict[int, tuple[str, str]]:
    return {line.rank: (line.digest, line.record) for line in lines if line.event == "finished"}


def _order(name: str) -> int:
    return next((at for at, first in enumerate(_FIRST) if name.startswith(first)), len(_FIRST))
