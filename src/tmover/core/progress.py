"""How ranks get on: who keeps the others waiting, and who is stuck. Pure rules over what they say.

Each rank says from time to time how far it is and for whom it waits. A job whose step does not move
is first suspected, and after `stuck_after` one of its nodes is named: the one whose ranks wait for
nobody while everybody waits for them. A rank that compiles, or is between two steps, where
checkpoints are written, may take as long as it likes; so may the first steps.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tmover.core.events import NO_STEP

FIRST_STEP = 3
"""Before this step nobody is stuck, or late: kernels are compiled, caches filled, buckets laid."""
SUSPECT_AT = 0.25
"""The part of `stuck_after` after which a standstill is shown."""
NOTABLE = 0.1
"""The part of a step that others have to wait for a rank, before it is called a straggler."""


class Activity(str, enum.Enum):
    """What a rank is doing."""

    STEP = "step"
    COMPILING = "compiling"
    BETWEEN_STEPS = "between steps"
    """The script's own: a checkpoint is written, a log, or the loop has not begun or is over."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of itself."""

    rank: int
    step: int
    """The last step it applied."""
    activity: str = ""
    """An `Activity`, or a word of a later version."""
    awaits: tuple[int, ...] = ()
    """Ranks that it waits for now; of very many, some."""
    waited: dict[int, float] = {}
    """How long it has waited for other ranks in the last `steps` steps, in seconds."""
    steps: int = 0
    median_s: float = 0.0
    """How long its steps take; 0 as long as it has done too few."""
    own_s: float = 0.0
    """How long its own part of a step takes, without waits for others; 0 if not known."""
    epoch: int = 0
    """The world that this is said of."""


class Limits(NamedTuple):
    """When a standstill is the end of a node."""

    stuck_s: float
    stuck_steps: float
    """In steps of the usual length."""

    def after_s(self, ranks: Iterable[Progress]) -> float | None:
        """Return how long a job may stand still; None if its usual step is not known."""
        known = [progress.median_s for progress in ranks if progress.median_s > 0]
        return max(self.stuck_s, self.stuck_steps * max(known)) if known else None


class Standstill(NamedTuple):
    """Since when a job has not moved."""

    epoch: int = 0
    step: int = NO_STEP
    since: float = 0.0

    def seen(self, epoch: int, ranks: Mapping[int, Progress], at: float) -> Standstill:
        """Return the standstill after another look. Time that is nobody's fault does not count."""
        step = min((progress.step for progress in ranks.values()), default=NO_STEP)
        is_same = (epoch, step) == (self.epoch, self.step) and step + 1 >= FIRST_STEP
        if is_same and not any(map(_is_excused, ranks.values())):
            return self
        return Standstill(epoch, step, at)


class Suspicion(NamedTuple):
    """A job stands still, and why."""

    ranks: tuple[int, ...]
    """For whom everybody waits; empty if nobody can be named."""
    still_s: float
    limit_s: float

    @property
    def is_certain(self) -> bool:
        """Whether it has lasted for so long that something is to be done."""
        return self.still_s >= self.limit_s

    def __str__(self) -> str:
        """Return it in words, as a person is shown it."""
        who = f"all wait for rank {_listed(self.ranks)}" if self.ranks else "nobody can be named"
        return f"no step for {self.still_s:.0f} s of {self.limit_s:.0f} s, {who}"


def suspicion(
    still: Standstill, ranks: Mapping[int, Progress], limits: Limits, at: float
) -> Suspicion | None:
    """Return what is suspected of a job; None while it moves, or nothing can be said yet."""
    limit_s = limits.after_s(ranks.values())
    if limit_s is None or at - still.since < limit_s * SUSPECT_AT:
        return None
    return Suspicion(blockers(ranks), at - still.since, limit_s)


def blockers(ranks: Mapping[int, Progress]) -> tuple[int, ...]:
    """Return the ranks that wait for nobody, if every other rank waits for them in the end."""
    free = {rank for rank, progress in ranks.items() if not progress.awaits}
    reached = set(free)
    grown = bool(free)
    while grown:
        before = len(reached)
        reached |= {rank for rank, said in ranks.items() if not reached.isdisjoint(said.awaits)}
        grown = len(reached) > before
    waiting = len(ranks) - len(free)
    return tuple(sorted(free)) if waiting and reached == set(ranks) else ()


def lateness(ranks: Mapping[int, Progress]) -> dict[int, float]:
    """Return how long, per step, others wait for each rank without its waiting for others itself.

    A rank that waits keeps those waiting that come after it: that time is not its own.
    """
    charged: dict[int, float] = dict.fromkeys(ranks, 0.0)
    for progress in ranks.values():
        for rank, seconds in progress.waited.items():
            if rank in charged:
                charged[rank] = max(charged[rank], seconds / max(progress.steps, 1))
    own = {
        rank: max(progress.waited.values(), default=0.0) / max(progress.steps, 1)
        for rank, progress in ranks.items()
    }
    return {rank: max(0.0, charged[rank] - own[rank]) for rank in ranks}


def straggler(ranks: Mapping[int, Progress]) -> int | None:
    """Return the rank that others wait for most, if that is a notable part of their step."""
    late = lateness(ranks)
    step_s = max((progress.median_s for progress in ranks.values()), default=0.0)
    worst = max(late, key=late.__getitem__, default=None)
    return worst if worst is not None and 0 < step_s * NOTABLE <= late[worst] else None


def _is_excused(progress: Progress) -> bool:
    """Return whether a rank waits for nobody and may take its time all the same."""
    return not progress.awaits and progress.activity != Activity.STEP.value


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
