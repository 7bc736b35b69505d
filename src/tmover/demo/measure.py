"""What happened, from the workers' own lines: pauses, phases, steps done again, samples, bits.

Pure functions over `Line`s. A step of a rank ends at the time of its `committed` line; an
interruption starts at a given time, when a person asked or a node was killed, and is over when
every rank has ended its first step in the next world that all of them passed into.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from tmover.demo.report import Move, Phases, Restart, Samples
from tmover.demo.trace import Line
from tmover.errors import StateError


class Gap(NamedTuple):
    """The time between the ends of two consecutive steps of one rank."""

    ended: float
    length: float


def gaps(lines: Iterable[Line]) -> Iterator[Gap]:
    """Yield the gaps between consecutive committed steps of each rank, whoever held it."""
    by_rank: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        if line.event == "committed":
            by_rank[line.rank].append(line)
    for committed in by_rank.values():
        committed.sort(key=lambda line: line.t)
        for one, next_one in itertools.pairwise(committed):
            if one.step is not None and next_one.step == one.step + 1:
                yield Gap(next_one.t, next_one.t - one.t)


def steady_step(lines: Iterable[Line]) -> float:
    """Return the median time from step to step."""
    lengths = [gap.length for gap in gaps(lines)]
    if not lengths:
        msg = "the trace holds no two consecutive steps: the job did not train"
        raise StateError(msg)
    return statistics.median(lengths)


def pause(lines: Sequence[Line], *, since: float, until: float) -> float:
    """Return the longest gap that ends between `since` and `until`, less one steady step."""
    longest = max((gap.length for gap in gaps(lines) if since <= gap.ended <= until), default=0.0)
    return max(0.0, longest - steady_step(lines))


def move(
    lines: Sequence[Line], *, kind: Literal["planned", "failure"], slot: int, at: float
) -> Move:
    """Return the interruption of `slot` at time `at`. Raises `StateError` if it never ended."""
    epoch = next_epoch(lines, at)
    passed = _of(lines, "passed", epoch)
    until = max(_first_step_ended(lines, line) for line in passed)
    joiner = next(line for line in passed if line.slot == slot)
    leaver = next(
        line
        for line in reversed(lines)
        if line.event == "committed"
        and line.slot == slot
        and line.node != joiner.node
        and line.t < until
    )
    redone = {line.step for line in lines if line.event == "redo" and at <= line.t <= until}
    return Move(
        kind=kind,
        slot=slot,
        leaver=leaver.node,
        joiner=joiner.node,
        phases_s=_phases(lines, kind, epoch, slot, at=at, until=until),
        pause_s=pause(lines, since=at, until=until),
        steps_redone=len(redone),
    )


def next_epoch(lines: Sequence[Line], at: float) -> int:
    """Return the first epoch after `at` whose commit barrier every rank passed."""
    world = {line.rank for line in lines if line.event == "committed"}
    ranks: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        if line.event == "passed" and line.epoch is not None and line.t >= at:
            ranks[line.epoch].add(line.rank)
    whole = [epoch for epoch, passed in ranks.items() if passed == world]
    if not whole:
        msg = f"the trace shows no world that all ranks passed into after {at:.3f} s"
        raise StateError(msg)
    return min(whole)


def _of(lines: Iterable[Line], event: str, epoch: int) -> list[Line]:
    return [line for line in lines if line.event == event and line.epoch == epoch]


def _first_step_ended(lines: Sequence[Line], passed: Line) -> float:
    for line in lines:
        if line.event == "committed" and line.worker == passed.worker and line.t >= passed.t:
            return line.t
    msg = f"rank {passed.rank} ended no step after it passed into epoch {passed.epoch}"
    raise StateError(msg)


def _first_step(lines: Sequence[Line], passed: Line) -> float:
    """Return how long a worker's first step took after it passed, from beginning to end."""
    ended = _first_step_ended(lines, passed)
    begun = [
        line.t
        for line in lines
        if line.event == "attempt" and line.worker == passed.worker and passed.t <= line.t <= ended
    ]
    return ended - max(begun, default=passed.t)


def _phases(
    lines: Sequence[Line], kind: str, epoch: int, slot: int, *, at: float, until: float
) -> Phases:
    """Return the phases, each from where the one before it ended or its own lines begin."""
    begun, ended = ("prepare_begin", "prepared") if kind == "planned" else ("assigned", "connected")
    orders = [line.t for line in _of(lines, begun, epoch)]
    links = [line.t for line in _of(lines, ended, epoch)]
    revoked = [line.t for line in lines if line.event == "revoked" and at <= line.t <= until]
    sent = [line.t for line in _of(lines, "handoff_begin", epoch)]
    held = [line.t for line in _of(lines, "handoff_end", epoch)]
    passed = _of(lines, "passed", epoch)
    barrier = max(line.t for line in passed)
    known = at if kind == "planned" else max((t for t in revoked if t <= barrier), default=at)
    ordered = max(orders, default=known)
    return Phases(
        detect=known - at,
        decide=max(0.0, ordered - known),
        connect=max(0.0, max(links, default=ordered) - ordered),
        handoff=max(0.0, max(held, default=0.0) - min(sent, default=0.0)),
        first_step=max(_first_step(lines, line) for line in passed if line.slot == slot),
    )


def samples(moved: Iterable[Line], undisturbed: Iterable[Line]) -> Samples:
    """Compare the samples of all committed steps, as multisets."""
    used, expected = Counter(_samples(moved)), Counter(_samples(undisturbed))
    return Samples(lost=(expected - used).total(), repeated=(used - expected).total())


def _samples(lines: Iterable[Line]) -> Iterator[str]:
    """Yield the samples of every step that was committed for good.

    A rank that died between applying a step and saying so has left only its attempt; the step
    counts if another rank committed it, since it was applied by all then. One that died after a
    vote that passed on no survivor has left a step that its successor does again: that one counts.
    So does, of a step that was taken back, only what was done after that.
    """
    attempts: dict[tuple[int, int], Line] = {}
    committed: dict[tuple[int, int], list[Line]] = {}
    for line in lines:
        key = (line.rank, -1 if line.step is None else line.step)
        if line.event == "attempt":
            attempts[key] = line
        elif line.event == "committed":
            same = [one for one in committed.get(key, []) if one.worker == line.worker]
            committed[key] = [*same, line]
        elif line.event in _BACK:
            for undone in [one for one in committed if one[0] == line.rank and one[1] > key[1]]:
                del committed[undone]
    steps = {step for _, step in committed}
    unsaid = [one for key, one in attempts.items() if key not in committed and key[1] in steps]
    for line in (*itertools.chain(*committed.values()), *unsaid):
        yield from map(repr, line.samples or ())


_BACK = ("returned", "formed", "handoff_end")
"""Events after which a rank stands at the step they name, or before the first."""


def equal(moved: Iterable[Line], undisturbed: Iterable[Line], *, world_size: int) -> bool:
    """Return whether all ranks ended both runs with the same bits."""
    mine, others = _digests(moved), _digests(undisturbed)
    return len(mine) == world_size and mine == others


def _digests(lines: Iterable[Line]) -> dict[int, str]:
    return {line.rank: line.digest for line in lines if line.event == "finished" and line.digest}


def restart(lines: Sequence[Line], *, killed_at: float) -> Restart:
    """Return what the restart after `killed_at` cost, from rank 0's lines before and after it."""
    before = [line.step or 0 for line in lines if line.t <= killed_at]
    after = [line for line in lines if line.t > killed_at and line.step is not None]
    last = max(before)
    new = next((line for line in after if (line.step or 0) > last), None)
    if new is None:
        msg = "the job was started again and never came to a new step"
        raise StateError(msg)
    redone = {line.step for line in after if line.t < new.t}
    return Restart(pause_s=new.t - killed_at, steps_redone=len(redone))


def median(restarts: Sequence[Restart]) -> Restart:
    """Return the restart with the median pause."""
    return sorted(restarts, key=lambda one: one.pause_s)[len(restarts) // 2]
