"""Waits for what must come, with a deadline that only a failure reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.01


def eventually(look: Callable[[], T], *, timeout_s: float = 30.0) -> T:
    """Return what `look` returns once that is true; fail with the last thing it returned."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"still {seen!r} after {timeout_s:g} s"
        time.sleep(_POLL_S)
