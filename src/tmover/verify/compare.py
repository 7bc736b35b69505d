"""Where two runs of one job part: at which step, in what, on which ranks. Pure functions of traces.

A step may have been done several times, by several processes: whichever of them said that it was
committed must have held what the undisturbed run held then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tmover.demo.trace import Line
from tmover.errors import StateError

SAMPLES, LOADER, BATCH, STREAM = "samples", "loader", "batch", "random stream"
AT_THE_END = "the whole state, at the end"
_FIRST = (SAMPLES, LOADER, BATCH, STREAM)
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


def unseeded(undisturbed: Iterable[Line], other: Iterable[Line]) -> dict[str, tuple[int, ...]]:
    """Return the random streams that were not the same from the start, and on which ranks.

    Nobody seeds them, so they differ from run to run; that is no harm if nothing depends on them.
    """
    expected, got = held(undisturbed), held(other)
    found: dict[str, set[int]] = defaultdict(set)
    first = min((place.step for place in expected), default=0)
    for place in expected.keys() & got.keys():
        if place.step == first:
            for name in _unequal(_merge(expected[place]), got[place]):
                if name.startswith(STREAM):
                    found[name].add(place.rank)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def parting(undisturbed: Sequence[Line], other: Sequence[Line]) -> Parting | None:
    """Return where `other` leaves the undisturbed run for the first time, None if it never does.

    Streams that nobody seeds are not looked at. Raises `StateError` if `other` has ranks or steps
    that the undisturbed run has not.
    """
    expected = {place: _merge(found) for place, found in held(undisturbed).items()}
    got = held(other)
    if unknown := got.keys() - expected.keys():
        msg = f"rank {min(unknown).rank} did a step {min(unknown).step} that the first run has not"
        raise StateError(msg)
    ignored = unseeded(undisturbed, other)
    unequal: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for place, times in got.items():
        for name in _unequal(expected[place], times):
            if place.rank not in ignored.get(name, ()):
                unequal[place.step][name].add(place.rank)
    loose = {rank for ranks in ignored.values() for rank in ranks}
    for rank in _ends_unequal(undisturbed, other, loose):
        unequal[max(expected).step + 1][AT_THE_END].add(rank)
    if not unequal:
        return None
    step = min(unequal)
    names = sorted(unequal[step], key=_order)
    return Parting(step, {name: tuple(sorted(unequal[step][name])) for name in names})


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


def _ends_unequal(
    undisturbed: Iterable[Line], other: Iterable[Line], loose: Collection[int]
) -> list[int]:
    """Return the ranks that did not end as they should have, or did not end.

    Of those in `loose` only what is tracked counts: their records hold streams nobody seeds. A rank
    that was lost after the loop has a record of a later vote than its twin, which is no difference.
    """
    expected, got = _ends(undisturbed), _ends(other)
    unequal = []
    for rank, end in expected.items():
        mine = got.get(rank)
        if (
            mine is None
            or mine.digest != end.digest
            or (mine.step == end.step and mine.record != end.record and rank not in loose)
        ):
            unequal.append(rank)
    return sorted(unequal)


def _ends(lines: Iterable[Line]) -> dict[int, Line]:
    return {line.rank: line for line in lines if line.event == "finished"}


def _order(name: str) -> int:
    """Return what comes first in a step: `batch`, not a `batchnorm.weight`."""
    return next((at for at, first in enumerate(_FIRST) if _is(name, first)), len(_FIRST))


def _is(name: str, first: str) -> bool:
    return name == first or name.startswith(f"{first}:")
