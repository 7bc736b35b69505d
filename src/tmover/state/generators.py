"""Random generators that belong to a sampler or a dataset, which no record holds.

What they yield depends on everything drawn before, in this process. A sampler's torch generator is
replaced by one that is seeded anew in every pass; any other is refused by its path.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def torch_generators(owner: Any) -> Iterator[tuple[str, torch.Generator]]:
    """Yield the torch generators that an object holds, by attribute."""
    for key, value in list(getattr(owner, "__dict__", {}).items()):
        if isinstance(value, torch.Generator):
            yield key, value


def obstacle(loader: Any, samplers: list[Any]) -> str:
    """Return which generator of a loader no joiner could go on with; nothing if there is none."""
    dataset = getattr(loader, "dataset", None)
    kinds = _foreign()
    held = [*((s, kinds) for s in samplers), (dataset, (*kinds, torch.Generator))]
    for owner, refused in held:
        for key, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, refused):
                return (
                    f"`{type(owner).__name__}.{key}` is a random generator of its own, and no "
                    "joiner could go on where it stands: draw from the global streams of torch, "
                    "numpy or random, which are seeded for every batch"
                )
    return ""


def _foreign() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.Random,)
    return (random.Random, numpy.random.Generator, numpy.random.RandomState)
