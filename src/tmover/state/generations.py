"""What a rank held after one step, copied into host memory: a way back, for itself or another rank.

The copy is made beside the training. What only an update changes (parameters, the optimizer's
state) is copied while the next step computes, and must be through before its update; the rest when
the copy begins.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import torch

from tmover.state import memory, shards
from tmover.state.capture import Captured, Tracked, capture
from tmover.state.landing import Landing
from tmover.state.memory import Layout
from tmover.state.parts import OptimizerPart
from tmover.state.records import Record

_ALIGN = 64


class Generation:
    """What one rank held after `step`; nothing in it changes once it is complete."""

    def __init__(
        self, step: int, *, seat: dict[str, str], header: bytes, layouts: Sequence[Layout]
    ) -> None:
        """Make room for it. `record` is set, and its tensors filled, by whoever completes it."""
        self.step = step
        self.seat = seat
        """What the rank's own tracked objects are, by name (`Tracked.seat`)."""
        self.record = b""
        """Its private record, as of the boundary after the step."""
        self.header = header
        self.layouts = tuple(layouts)
        sizes = [-(-layout.size_bytes // _ALIGN) * _ALIGN for layout in layouts]
        ends = list(itertools.accumulate(sizes))
        self._memory = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8)
        self.tensors = [
            memory.shaped(self._memory[end - size : end], layout)
            for end, size, layout in zip(ends, sizes, layouts, strict=True)
        ]

    @property
    def size_bytes(self) -> int:
        """How much memory its tensors take."""
        return self._memory.numel()

    @property
    def captured(self) -> Captured:
        """What to send."""
        return Captured(header=self.header, tensors=self.tensors, layouts=self.layouts)

    def restore(self, tracked: Tracked) -> None:
        """Put what is tracked back to what it was; the record is the caller's to adopt."""
        landing = Landing(tracked, self.header)
        with torch.no_grad():
            for live, copy in zip(landing.tensors, self.tensors, strict=True):
                memory.put(live, copy)
        landing.adopt()


class Copying:
    """A generation that is being made. `finish` may run in another thread than the training."""

    def __init__(self, tracked: Tracked, *, step: int, record: bytes) -> None:
        """Copy what a forward may change. `record`: this rank's, of the vote on `step`, if any."""
        captured = capture(tracked)
        self.generation = Generation(
            step, seat=tracked.seat(), header=captured.header, layouts=captured.layouts
        )
        mine = Record.decode(record) if record else Record.capture(tracked, position=None)
        self.generation.record = mine.renewed(tracked).encode()
        lasting = _updated_only(tracked)
        pairs = list(zip(self.generation.tensors, captured.tensors, strict=True))
        _copy([pair for pair in pairs if id(pair[1]) not in lasting])
        self._left = [pair for pair in pairs if id(pair[1]) in lasting]
        self._lock = threading.Lock()

    def finish(self) -> Generation:
        """Copy what is left to copy, and return the generation. Twice is harmless."""
        with self._lock:
            left, self._left = self._left, []
            _copy(left)
        return self.generation


def _updated_only(tracked: Tracked) -> set[int]:
    """Return the tensors, by id, that nothing but an optimizer's step changes."""
    found = {id(shards.local(parameter)) for parameter in tracked.parameters()}
    for each in tracked.every_part():
        for state in each.states.values() if isinstance(each, OptimizerPart) else ():
            values = state.values() if isinstance(state, dict) else ()
            found.update(id(shards.local(v)) for v in values if isinstance(v, torch.Tensor))
    return found


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for copy, live in pairs:
            copy.copy_(live.detach())
