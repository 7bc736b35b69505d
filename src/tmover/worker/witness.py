"""What a process would have told its peers, while nobody hears it: by which two runs compare.

In a rehearsal collectives are answered here. A witness notes what was put into each: the group, the
operation and a digest of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tmover.state import marks

_ALONE = {"allreduce", "broadcast", "reduce", "barrier"}
"""Operations whose first argument is what is put in; with the others it is the second."""


class Witness:
    """Notes what goes into collectives and messages, in order."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}

    def note(self, operation: str, ranks: Sequence[int], value: Any) -> None:
        """Add a word to those ranks of the world."""
        self.facts[f"{operation} number {len(self.facts)}"] = f"{tuple(ranks)} {_digest(value)}"

    def over(self, carrier: Any, ranks: Sequence[int]) -> Any:
        """Return what carries collectives out as `carrier` does, and notes what goes into them."""
        return _Noting(self, carrier, ranks)


class _Noting:
    def __init__(self, witness: Witness, carrier: Any, ranks: Sequence[int]) -> None:
        self._witness, self._carrier, self._ranks = witness, carrier, ranks

    def __getattr__(self, name: str) -> Callable[..., None]:
        perform = getattr(self._carrier, name)

        def noted(*args: Any, **kwargs: Any) -> None:
            given = args[0 if name in _ALONE else 1] if args else None
            self._witness.note(name, self._ranks, None if name == "barrier" else given)
            perform(*args, **kwargs)

        return noted


def _digest(value: Any) -> str:
    try:
        return marks.digest(value)
    except Exception:  # noqa: BLE001 - whatever a stranger's object raises when it is looked at
        return type(value).__name__
