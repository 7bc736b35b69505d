"""How this rank gets on, for the agent: read off from outside by the control thread, once a second.

The main thread only writes down when it applied a step. So a rank that hangs is still spoken for,
and nobody is told anything in the middle of a step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from typing import NamedTuple

from tmover.comm.fabric import Fabric
from tmover.comm.waits import waits
from tmover.core.progress import FIRST_STEP, Activity, Progress
from tmover.worker.own import Own

LOOK_S = 1.0
"""How often it is said."""
_WINDOW = 32
"""So many steps, or looks, is what is looked back on."""
_FEW = 3
"""With fewer steps than this the usual length of one is not known."""
_NAMED = 16
"""Of more ranks than this only the worst are named."""
_TINY_S = 1e-4


class _Look(NamedTuple):
    step: int
    waited: dict[int, float]


class Pace:
    """One rank's, from its start to its end, whatever rank and world it is in."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.own = Own()
        self._activity = Activity.BETWEEN_STEPS
        self._lengths: deque[float] = deque(maxlen=_WINDOW)
        self._applied_at = 0.0
        self._epoch = 0
        self._looks: deque[_Look] = deque(maxlen=_WINDOW)
        self._is_listening = False
        self._compiling = False

    def begin(self) -> None:
        """Note that a step is begun: from loading its batch on."""
        self._activity = Activity.STEP
        self.own.begin()

    def applied(self) -> None:
        """Note that a step was applied."""
        now = time.monotonic()
        if self._applied_at:
            self._lengths.append(now - self._applied_at)
        self._applied_at = now
        self.own.end()
        self._activity = Activity.BETWEEN_STEPS

    def look(self, step: int) -> Progress | None:
        """Return how this rank gets on after `step`; None as long as it is in no world."""
        self._listen()
        world = self._fabric.worlds.present
        if world is None or world.rank is None:
            return None
        if world.epoch != self._epoch:
            self._epoch = world.epoch
            self._looks.clear()
            self.own.forget()
        if step < FIRST_STEP:
            self._looks.clear()  # until all are up and warm they wait for each other
            self.own.forget()
        seen = waits(world)
        now = _Look(step, {rank: wait.waited_s for rank, wait in seen.items()})
        if not self._looks or self._looks[-1].step != step:
            self._looks.append(now)
        first = self._looks[0]
        waited = {rank: total - first.waited.get(rank, 0.0) for rank, total in now.waited.items()}
        worst = sorted(waited, key=waited.__getitem__, reverse=True)[:_NAMED]
        return Progress(
            rank=world.rank,
            step=step,
            activity=(Activity.COMPILING if self._compiling else self._activity).value,
            awaits=tuple(rank for rank, wait in seen.items() if wait.is_awaited)[:_NAMED],
            waited={rank: round(waited[rank], 6) for rank in worst if waited[rank] > _TINY_S},
            steps=step - first.step,
            median_s=self._median_s(),
            own_s=self.own.median_s(),
            epoch=world.epoch,
        )

    def _median_s(self) -> float:
        lengths = list(self._lengths)
        return round(statistics.median(lengths), 6) if len(lengths) >= _FEW else 0.0

    def _listen(self) -> None:
        """Be told of compilations, once there is a compiler: importing one takes seconds."""
        compiler = sys.modules.get("torch._dynamo.callback")
        if self._is_listening or compiler is None:
            return
        compiler.on_compile_start(self._compilation_begins)
        compiler.on_compile_end(self._compilation_ends)
        self._is_listening = True

    def _compilation_begins(self, *_: object) -> None:
        self._compiling = True

    def _compilation_ends(self, *_: object) -> None:
        self._compiling = False
