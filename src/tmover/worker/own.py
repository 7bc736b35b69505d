"""How long this rank's own part of a step takes: its loader, its work, and no wait for others.

A step counts from the loading of its batch to its vote, and from the vote's end until the update is
applied. The vote itself, and what the script does between two steps, do not count: there rank 0 has
more to do than others.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from tmover.comm.idle import IDLE, Idle

WINDOW = 20
"""So many steps are looked back on."""
_FEW = 5
"""With fewer steps than this nothing is said."""


class Own:
    """The last steps of one rank. The thread that trains writes, another one may read."""

    def __init__(self, idle: Idle = IDLE) -> None:
        self._idle = idle
        self._lengths: deque[float] = deque(maxlen=WINDOW)
        self._since: float | None = None
        """When the part of the step that runs now began, in this rank's own time."""
        self._sum: float | None = None
        """What the step has taken so far; None if none has begun."""

    def begin(self) -> None:
        """Begin a step, or begin it again: what came of it so far does not count."""
        self._idle.follow()
        self._sum, self._since = 0.0, self._clock()

    def pause(self) -> None:
        """Stop counting: the vote begins."""
        if self._sum is not None and self._since is not None:
            self._sum += self._clock() - self._since
            self._since = None

    def resume(self) -> None:
        """Go on counting: the vote is over."""
        if self._sum is not None:
            self._since = self._clock()

    def end(self) -> None:
        """Take the step in, now that it is applied."""
        self.pause()
        if self._sum is not None:
            self._lengths.append(self._sum)
        self._sum = None

    def forget(self) -> None:
        """Begin anew: the steps of another world, or of a start, tell nothing of this one."""
        self._lengths.clear()

    def median_s(self) -> float:
        """Return what a step takes; 0 where too few were done, or waits cannot be told apart."""
        lengths = list(self._lengths)
        if len(lengths) < _FEW or self._idle.is_blind:
            return 0.0
        return round(statistics.median(lengths), 6)

    def _clock(self) -> float:
        return time.monotonic() - self._idle.seconds
