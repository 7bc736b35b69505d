"""How often something may be done: so many times at once, and then so many a second. Pure."""

from __future__ import annotations


class Allowance:
    """What is left to somebody; it fills with time. Times are the caller's, in seconds."""

    def __init__(self, per_s: float, at_once: float, now: float) -> None:
        self._per_s, self._at_once = per_s, at_once
        self._left, self.at = at_once, now

    def take(self, now: float) -> bool:
        """Take one if there is one; return whether there was.

        >>> allowance = Allowance(per_s=1.0, at_once=2.0, now=0.0)
        >>> [allowance.take(0.0) for _ in range(3)], allowance.take(1.0)
        ([True, True, False], True)
        """
        self._fill(now)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def wait_s(self, now: float) -> float:
        """Take one in any case; return how long it is until it may be used."""
        self._fill(now)
        self._left -= 1.0
        return max(0.0, -self._left / self._per_s)

    def _fill(self, now: float) -> None:
        self._left = min(self._at_once, self._left + max(0.0, now - self.at) * self._per_s)
        self.at = now
