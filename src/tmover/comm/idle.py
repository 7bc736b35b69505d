"""How long the thread that trains has waited for other ranks, since this process began.

Counted is what that thread waits in, and nothing else: a collective that another thread carries out
beside a backward that still computes keeps nobody waiting. Copying and reducing what has come is
work. A collective of torch's own communicators tells nothing of its inside: all of it counts as
waiting. On a stream of a device nobody waits that could be seen: there the count means nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_NOBODY = 0
_engine = torch.autograd.Variable._execution_engine


class Idle:
    """Seconds waited by one thread. All other threads may ask for them."""

    def __init__(self) -> None:
        self._thread = _NOBODY
        self._waited_s = 0.0
        self._unseen_s = 0.0
        """In waits of C++ for futures, which it tells nobody about."""
        self._lock = threading.Lock()
        self._promised = 0
        self._backward = -1
        self._blocked_since: float | None = None
        self.is_blind = False
        """Whether a collective was put on a device's stream: what follows waits for it there."""

    @property
    def seconds(self) -> float:
        """How long it has waited in all; a wait counts once it is over."""
        return self._waited_s + self._unseen_s

    @property
    def is_blocked(self) -> bool:
        """Whether a backward stands at its end, for a future."""
        return self._blocked_since is not None

    def follow(self) -> None:
        """Count the waits of this thread from now on, and of no other."""
        self._thread = threading.get_ident()

    def charge(self, seconds: float) -> None:
        """Note that the caller has waited so long."""
        if threading.get_ident() == self._thread:
            self._waited_s += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the caller waits for others in here, and does nothing else."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.charge(time.monotonic() - began)

    # --- futures ----------------------------------------------------------------------------------

    def promise(self) -> bool:
        """Note that a backward was given a future, which it waits for at its end, in C++.

        Returns False where no backward runs: who waits then, and whether, is not known. Each
        promise is to be kept once.
        """
        backward = torch._C._current_graph_task_id()
        if backward < 0 or threading.get_ident() != self._thread:
            return False
        with self._lock:
            is_first, self._backward = backward != self._backward, backward
            self._promised += 1
        if is_first:  # before DDP asks for the same, so that this is called before it waits
            _engine.queue_callback(self._backward_ends)
        return True

    def keep(self) -> None:
        """Note that a promised future gets its result now."""
        with self._lock:
            self._promised -= 1
            if self._promised == 0 and self._blocked_since is not None:
                self._unseen_s += time.monotonic() - self._blocked_since
                self._blocked_since = None

    def _backward_ends(self) -> None:
        with self._lock:
            self._blocked_since = time.monotonic() if self._promised else None


IDLE = Idle()
"""This process's: it has one thread that trains."""
