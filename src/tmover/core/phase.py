"""Where a job is: one frozen class per phase, which holds what only that phase needs.

    forming -> training -> preparing -> armed -> switching -> training       a planned move
               training -> revoked -> switching -> training                  a failure
                           revoked -> waiting -> switching                   without a standby
                                      waiting -> ended                       and without a node
                           revoked -> forming                                before the first vote

Every phase can end in `Ended`. `docs/architecture.md` draws all changes of phase.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Union

from tmover.core.events import Plan


class Stage(str, enum.Enum):
    """The name of a phase in `tmover status`."""

    NEW = "new"
    FORMING = "forming"
    TRAINING = "training"
    PREPARING = "preparing"
    ARMED = "armed"
    SWITCHING = "switching"
    REVOKED = "revoked"
    WAITING = "waiting"
    ENDED = "ended"


class Accusation(NamedTuple):
    """A worker saw its link to another one break."""

    accuser: str
    accused: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A planned move: the world that would be, and who comes in."""

    plan: Plan
    slots: tuple[str, ...]
    """The agent of each slot after the move."""
    leavers: Mapping[int, str]
    """The agent that leaves, by slot."""
    sources: Mapping[str, str]
    """The leaver's worker that hands its state over, by joining worker."""
    helpers: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Stayers that hold the same and may send a part of it, by joining worker."""

    @property
    def epoch(self) -> int:
        """The epoch this move would open."""
        return self.plan.epoch

    @property
    def joiners(self) -> tuple[str, ...]:
        """The agents that come in, in the order of their slots."""
        return tuple(self.slots[slot] for slot in sorted(self.leavers))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A revocation under way: what is revoked, who is accused, and who has answered."""

    epochs: tuple[int, ...]
    """In the order of their revocation. Deadlines count for the last one only."""
    move: Move | None
    """The planned move whose epoch is among them. Whether it holds is what the reports say."""
    accusations: tuple[Accusation, ...] = ()
    answered: frozenset[str] = frozenset()
    """Agents that answered the probe of this revocation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class New:
    """Not submitted yet."""

    stage: ClassVar[Stage] = Stage.NEW


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forming:
    """Slots are being filled and workers launched."""

    stage: ClassVar[Stage] = Stage.FORMING
    since: int
    """The last epoch before; deadlines of this phase carry it."""
    vacated: frozenset[int] = frozenset()
    """Slots whose agent was lost: a standby may take them at once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """The first world is known; its ranks connect, build their model and enter the loop."""

    stage: ClassVar[Stage] = Stage.FORMING


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All is well."""

    stage: ClassVar[Stage] = Stage.TRAINING


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """Phase 1 of a planned move: links are opened beside the training. Nobody is armed."""

    stage: ClassVar[Stage] = Stage.PREPARING
    move: Move
    prepared: frozenset[str] = frozenset()
    """Workers that are ready."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """All vote for the epoch of the move; the first vote that all cast so switches."""

    stage: ClassVar[Stage] = Stage.ARMED
    move: Move


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Switching:
    """Phase 2 of a planned move: some rank stands at the boundary, or is beyond it."""

    stage: ClassVar[Stage] = Stage.SWITCHING
    move: Move
    passed: frozenset[str] = frozenset()
    """Workers that train in the new world."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accusing:
    """Epochs are revoked; accusations are collected and probes are out."""

    stage: ClassVar[Stage] = Stage.REVOKED
    loss: Loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """It is settled who is lost; the survivors have yet to say where they stand."""

    stage: ClassVar[Stage] = Stage.REVOKED
    loss: Loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A slot is empty and no standby can take it yet. The survivors stand still."""

    stage: ClassVar[Stage] = Stage.WAITING
    loss: Loss
    since: float = 0.0
    """The controller's wall clock when the wait began."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """No node has come in time. The survivors write what they hold; then the job ends."""

    stage: ClassVar[Stage] = Stage.WAITING
    epoch: int
    """It forms no world: it only revokes those before."""
    step: int
    parts: Mapping[str, tuple[int, ...]]
    """The ranks whose parts each worker writes."""
    back: bool
    """Whether all return to the copies of `step`."""
    why: str
    """Why the job ends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovering:
    """Survivors and joiners go to the assigned world, which is the plan in force already."""

    stage: ClassVar[Stage] = Stage.SWITCHING
    step: int
    sources: Mapping[str, str]
    """Who sends its state, by receiving worker."""
    helpers: Mapping[str, tuple[str, ...]]
    """Who else holds the same and may send a part, by receiving worker."""
    relink: tuple[tuple[str, str], ...]
    passed: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Over, with the exit code that every agent is told."""

    stage: ClassVar[Stage] = Stage.ENDED
    code: int
    reason: str


Phase = Union[
    New, Forming, Starting, Training, Preparing, Armed, Switching, Accusing, Reporting, Waiting,
    Storing, Recovering, Ended,
]  # fmt: skip
