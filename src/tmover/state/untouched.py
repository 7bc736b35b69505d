"""Whether parameters are still what they were when a step opened.

They are not copied at every step, so a broken attempt cannot put them back. An update that is
written by hand, or a momentum encoder that moves in the forward, would be applied twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tmover.state import shards


class Untouched:
    """Parameters' version counters; and, as `.data` is not counted, their norms where asked."""

    def __init__(self, parameters: Sequence[torch.Tensor], *, closely: bool) -> None:
        self._parameters = parameters
        self._own = [shards.local(p) for p in parameters]
        self._versions = [own._version for own in self._own]
        self._measured = [p for p in self._own if p.is_floating_point()] if closely else []
        self._norms = _norms(self._measured)

    def changed(self) -> torch.Tensor | None:
        """Return a parameter that was changed since, or None."""
        for place, (own, version) in enumerate(zip(self._own, self._versions, strict=True)):
            if own._version != version:
                return self._parameters[place]
        for own, before, now in zip(
            self._measured, self._norms, _norms(self._measured), strict=True
        ):
            if before != now and not (math.isnan(before) and math.isnan(now)):
                place = next(i for i, each in enumerate(self._own) if each is own)
                return self._parameters[place]
        return None


def _norms(parameters: list[torch.Tensor]) -> list[float]:
    with torch.no_grad():
        return [n.item() for n in torch._foreach_norm(parameters)] if parameters else []
