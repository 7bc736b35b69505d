"""What `tmover demo` found: the contents of its `--json` file."""

from __future__ import annotations

from typing import Literal

import msgspec


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of an interruption went, in seconds. Phases may overlap."""

    detect: float
    """From the kill until the last survivor knew; 0 for a planned move."""
    decide: float
    """Until the last worker had its orders."""
    connect: float
    """Until the last link to the joiner was open. Training goes on meanwhile in a planned move."""
    handoff: float
    """The state's way to the joiner, checked."""
    first_step: float
    """The joiner's first step in the new world, from its beginning to its end."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One interruption, as the workers saw it."""

    kind: Literal["planned", "failure"]
    slot: int
    leaver: str
    joiner: str
    phases_s: Phases
    pause_s: float
    """The longest gap between the ends of two consecutive steps around it, less one steady step."""
    steps_redone: int


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """What a restart from the last checkpoint costs: from the kill to the first new step's end."""

    pause_s: float
    steps_redone: int


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """Committed samples against those of the undisturbed run."""

    lost: int
    repeated: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole demo."""

    equal: bool
    """Whether every rank's final state has the bits of the undisturbed run."""
    world_size: int
    steps: int
    step_s: float
    moves: list[Move]
    restart: Restart
    samples: Samples

    def to_json(self) -> bytes:
        """Return the file's contents."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
