"""What a run of the campaign does to its job: drawn from the run's seed, and from nothing else."""

from __future__ import annotations

import pathlib
import random
from typing import NamedTuple

from support.training import Kind

_E2E = pathlib.Path(__file__).parents[1] / "tests" / "e2e"
_SHARDED, _UNDO = _E2E / "train_sharded.py", _E2E / "train_undo.py"
_PIPELINE = _E2E / "train_pipeline.py"

KINDS: dict[str, Kind] = {
    "ddp": Kind(),
    "ddp of two ranks a node": Kind(nodes=2, nproc=2),
    "ddp with loader workers": Kind(arguments=("--workers", "2")),
    "ddp with accumulation": Kind(arguments=("--micro", "2")),
    "ddp with late changes": Kind(arguments=("--codes", "--late", "average")),
    "ddp with own late changes": Kind(arguments=("--late", "whole", "count")),
    "fsdp": Kind(nodes=4, steps=12, arguments=("--layout", "fsdp"), script=_SHARDED),
    "hsdp": Kind(nodes=4, steps=12, arguments=("--layout", "hsdp"), script=_SHARDED),
    "tp": Kind(nodes=4, steps=12, arguments=("--layout", "tp"), script=_SHARDED),
    "pp": Kind(nodes=2, steps=12, arguments=("--pipelines", "1"), script=_PIPELINE),
    "pp x dp": Kind(nodes=4, steps=12, arguments=("--pipelines", "2"), script=_PIPELINE),
    "gan": Kind(steps=12, arguments=("--what", "gan"), script=_UNDO),
    "zero": Kind(steps=12, arguments=("--what", "zero"), script=_UNDO),
    "closure": Kind(steps=12, arguments=("--what", "closure"), script=_UNDO),
}

FAULTS = ("kill", "kill", "killnode", "stop", "cut")
_STEP = (
    "step_open", "before_backward", "in_backward", "before_vote", "in_vote", "after_vote",
    "before_update", "after_update", "after_body",
)  # fmt: skip
_BARRIER = ("before_barrier", "in_barrier", "after_barrier")
_LEAVER = ("in_prepare", "in_vote", "after_vote", "before_handoff", "in_handoff", "after_handoff")
_STAYER = ("in_prepare", "in_vote", "after_vote", *_BARRIER)
_JOINER = ("in_prepare", "in_handoff", *_BARRIER)
_FIRST_STEP = ("step_open", "before_vote", "after_update")
"""Where a joiner may be lost in the first step that it does."""
_RECOVERY = ("before_handoff", "in_handoff", "after_handoff", *_BARRIER)
_FIRST_HOLD = 2
"""Before that a loss starts all workers afresh, which has its own tests."""


class Scenario(NamedTuple):
    """One run: which job, and what happens to it."""

    seed: int
    kind: str
    standbys: int
    hold: int | None
    """The step after which rank 0 waits until the standbys are warm; None if it does not wait."""
    move: int | None
    """The slot that is to be left while rank 0 waits."""
    controller: str
    """When the controller is killed: `held`, `preparing`, `armed`, or not at all."""
    inject: tuple[str, ...]
    """What processes do to themselves, as in `TMOVER_INJECT`."""

    def __str__(self) -> str:
        said = [self.kind, *self.inject]
        if self.move is not None:
            said.insert(1, f"move of slot {self.move} after step {self.hold}")
        if self.controller:
            said.append(f"controller killed ({self.controller})")
        return "; ".join(said)


def draw(seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Scenario:
    """Return the scenario of a seed."""
    return _Draw(seed, kinds).scenario()


class _Draw:
    """The chances of one seed, and what was drawn so far."""

    def __init__(self, seed: int, kinds: tuple[str, ...]) -> None:
        self._seed = seed
        self._chance = chance = random.Random(seed)  # noqa: S311 - to be repeated, not secret
        self._name = chance.choice(kinds)
        self._kind = kind = KINDS[self._name]
        self._moves = chance.random() < 0.5
        self._waits = self._moves or chance.random() < 0.7
        self._hold = chance.randint(_FIRST_HOLD, kind.steps // 2)
        self._left = chance.randrange(kind.nodes)
        """The slot of the leaver, if there is to be a move."""
        self._spared = list(range(kind.nodes))
        """Slots to which nothing is to happen yet: a rank that is lost twice is lost once."""
        self._inject: list[str] = []

    def scenario(self) -> Scenario:
        chance = self._chance
        count = chance.choice((1, 1, 2))
        controller = ""
        if self._waits and chance.random() < 0.2:
            controller = chance.choice(("preparing", "armed")) if self._moves else "held"
            count -= 1
        while len(self._inject) < count:
            self._inject.append(self._in_a_move() if self._moves else self._in_training())
        lost = sum(not fault.startswith("cut") for fault in self._inject)
        return Scenario(
            seed=self._seed,
            kind=self._name,
            standbys=lost + self._moves,
            hold=self._hold if self._waits else None,
            move=self._left if self._moves else None,
            controller=controller,
            inject=tuple(self._inject),
        )

    def _in_training(self) -> str:
        """Draw a fault of a rank in a step; as a second one, maybe in the recovery."""
        chance, fault = self._chance, self._chance.choice(FAULTS)
        if self._inject and chance.random() < 0.3:
            return f"{fault}:{self._joiner()},point={chance.choice(_JOINER[1:])}"
        who = self._take(self._spared)
        if self._inject and chance.random() < 0.5:
            return f"{fault}:{who},point={chance.choice(_RECOVERY)}"
        if chance.random() < 0.1:
            return f"{fault}:{who},point=at_finish"
        first = self._hold + 1 if self._waits else _FIRST_HOLD
        step = chance.randint(first, self._kind.steps - 1)
        return f"{fault}:{who},step={step},point={chance.choice(_STEP)}"

    def _in_a_move(self) -> str:
        """Draw a fault of a stayer, the leaver or the joiner."""
        chance, fault = self._chance, self._chance.choice(FAULTS)
        role = chance.choice(("stayer", "leaver", "joiner"))
        if role == "joiner":
            point = chance.choice((*_JOINER, *_FIRST_STEP))
            step = f",step={self._hold + 2}" if point in _FIRST_STEP else ""
            return f"{fault}:{self._joiner()}{step},point={point}"
        if role == "leaver" and self._left in self._spared:
            who, point = self._take([self._left]), chance.choice(_LEAVER)
        else:
            who = self._take([slot for slot in self._spared if slot != self._left])
            point = chance.choice(_STAYER)
        step = f",step={self._hold + 1}" if "vote" in point else ""
        return f"{fault}:{who}{step},point={point}"

    def _joiner(self) -> str:
        """Return the key of the first standby: those that come after it are spared."""
        return f"sandbox=1,node=node{self._kind.nodes + 1}-"

    def _take(self, slots: list[int]) -> str:
        """Return the keys of a rank of one of these slots, which is not spared any more.

        They name the slot's first node: a job that is started afresh is not lost there again.
        """
        slot = self._chance.choice(slots)
        self._spared.remove(slot)
        rank = slot * self._kind.nproc + self._chance.randrange(self._kind.nproc)
        return f"rank={rank},node=node{slot + 1}-"
