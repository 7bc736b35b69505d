"""The proof that a process can become another rank in place: that nothing of the script keeps one.

A step is done twice from the same state, random streams and position of the data: by a process that
has become the rank in place, and by one that has run the script as that rank from the beginning.
What is put into collectives, the gradients, all that is tracked afterwards and every variable that
the script may still read must be the same to the bit. If something is not, or cannot be compared,
the process runs the script again before it takes another slot: that is slower, and never wrong.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from tmover.core.orders import Welcome
from tmover.errors import StateError
from tmover.state import marks, shards
from tmover.state.capture import Tracked
from tmover.state.digests import digests
from tmover.state.generations import Copying, Generation
from tmover.state.position import Position
from tmover.state.records import Record
from tmover.worker import variables
from tmover.worker.witness import Witness

_NAMED = 3
"""How many differences are named."""


@dataclasses.dataclass(kw_only=True)
class Trial:
    """One of the two: where it begins, and what is seen of it."""

    generation: Generation | None
    """The state it begins with; None if the process could not become the rank in place."""
    index: int
    obstacle: str = ""
    """Why it could not."""
    order: Welcome | None = None
    """Whom the script is to be run as after it."""
    witness: Witness = dataclasses.field(default_factory=Witness)
    facts: dict[str, str] = dataclasses.field(default_factory=dict)

    def afresh(self) -> Trial:
        """Return the same trial for a process that has run the script as that rank."""
        return Trial(generation=self.generation, index=self.index)

    def begin(self, batch: Any) -> None:
        """Note what the step is done with, and put the random streams to where it begins."""
        assert self.generation is not None
        self.witness.note("batch", (), batch)
        Record.decode(self.generation.record).restore_rng()

    def see_gradients(self, tracked: Tracked) -> None:
        """Note the gradients, as the first update finds them."""
        if "gradients" in self.facts:
            return
        self.facts["gradients"] = "none" if not tracked.parameters() else "some"
        for number, parameter in enumerate(tracked.parameters()):
            if parameter.grad is not None:
                grad = shards.local(parameter.grad)
                assert isinstance(grad, torch.Tensor)
                self.facts[f"gradient of {tracked.name_of(parameter)} ({number})"] = marks.digest(
                    grad
                )

    def see_end(self, tracked: Tracked, position: Position | None) -> None:
        """Note what is tracked after the step."""
        self.facts |= digests(tracked, Record.capture(tracked, position=position))

    def see_variables(self, before: variables.Facts) -> None:
        """Note what the script may still read, at the end of its turn, if it is as `before`.

        `before` is how it was when the loop began. What changes in the loop has the values of a
        rehearsal on a joiner, however it came to be one: it is tracked, or it does not matter.
        """
        for name, value in variables.still_read(sys._getframe()).items():
            if before.get(name) == value:
                self.facts[f"variable {name}"] = value

    def compare(self, other: Trial) -> str:
        """Return in what the two differ, "" if in nothing."""
        if other.obstacle:
            return other.obstacle
        mine = {**self.facts, **self.witness.facts}
        theirs = {**other.facts, **other.witness.facts}
        wrong = [k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)]
        if not wrong:
            return ""
        wrong.sort(key=lambda name: (not name.startswith("variable "), name))
        named = ", ".join(name.removeprefix("variable ") for name in wrong[:_NAMED])
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        return f"made another rank in place, it has another {named}{more} than run as that rank"


def in_place(tracked: Tracked, *, position: Position | None, index: int, order: Welcome) -> Trial:
    """Return a trial that begins with what is tracked now."""
    record = Record.capture(tracked, position=position).encode()
    generation = Copying(tracked, step=index, record=record).finish()
    return Trial(generation=generation, index=index, order=order)


def obstructed(error: Exception, order: Welcome) -> Trial:
    """Return the trial of a process that could not become the rank."""
    why = str(error) if isinstance(error, StateError) else repr(error)
    return Trial(generation=None, index=0, obstacle=why, order=order)
