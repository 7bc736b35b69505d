"""Whether a batch was changed since it was fetched."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

_DEPTH = 8


class Fingerprint:
    """What a batch was made of when it came.

    Tensors count by identity and version, arrays by their bytes, containers by their items, other
    objects by what they hold. What a tensor's version does not count goes unnoticed.
    """

    def __init__(self, batch: Any) -> None:
        self._held: list[Any] = []
        self._marks = list(_marks(batch, self._held))

    def matches(self, batch: Any) -> bool:
        """Return whether `batch` is still the same, unchanged."""
        return self._marks == list(_marks(batch, []))


def _marks(value: Any, held: list[Any], depth: int = 0) -> list[Any]:
    """Return marks that change with the value. What is marked by identity is added to `held`."""
    if isinstance(value, torch.Tensor):
        held.append(value)
        return [id(value), -1 if value.is_inference() else value._version]
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return [repr(value)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return [value.shape, value.dtype.str, xxhash.xxh3_128_digest(value.tobytes())]
    held.append(value)
    marks: list[Any] = [id(value)]
    if depth < _DEPTH:
        for inner in _inside(value):
            marks += _marks(inner, held, depth + 1)
    return marks


def _inside(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return [item for pair in value.items() for item in pair]
    return list(vars(value).values()) if hasattr(value, "__dict__") else []
