"""The deadlines that run: each becomes an event in its turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import msgspec

from tmover.config import DeadlineConfig
from tmover.core.events import DeadlinePassed, Wait
from tmover.core.orders import ArmDeadline


class Timers:
    """One per job, kind and epoch; arming one again begins its time anew."""

    def __init__(self, deadlines: DeadlineConfig, post: Callable[[DeadlinePassed], None]) -> None:
        self._deadlines = deadlines
        self._post = post
        self._running: dict[DeadlinePassed, asyncio.TimerHandle] = {}
        """By the event that each posts when it fires."""

    def arm(self, deadline: ArmDeadline, *, extra_s: float = 0.0) -> None:
        """Post `DeadlinePassed` after the configured time and `extra_s`."""
        passed = DeadlinePassed(job=deadline.job, wait=deadline.wait, epoch=deadline.epoch)
        ago_s = time.time() - deadline.since if deadline.since else 0.0
        seconds = max(0.0, self.wait_s(deadline.wait) - ago_s) + extra_s
        if passed in self._running:
            self._running.pop(passed).cancel()
        loop = asyncio.get_running_loop()
        self._running[passed] = loop.call_later(seconds, self._post, passed)

    def fired(self, passed: DeadlinePassed) -> None:
        """Note that it was heard."""
        self._running.pop(msgspec.structs.replace(passed, at=0.0), None)

    def wait_s(self, wait: Wait) -> float:
        """Return how long a wait may take, in seconds; for ever if nothing is set."""
        return float(getattr(self._deadlines, f"{wait.value}_s")) or math.inf
