"""A digest of all that a batch holds: two batches with the same one have the same bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from tmover.state import memory

_DEPTH = 16


def digest(batch: Any) -> str:
    """Return the digest. Of what is no value, the type and its attributes count."""
    hasher = xxhash.xxh3_128()
    for part in _parts(batch, 0):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    yield type(value).__qualname__.encode()
    numpy = sys.modules.get("numpy")
    if depth > _DEPTH or value is None:
        return
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        yield f"{dense.dtype}{tuple(dense.shape)}".encode()
        yield memory.copy_out([dense.contiguous()])[0]
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        yield f"{value.dtype}{value.shape}".encode()
        yield repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
    elif isinstance(value, (bool, int, float, complex, str)):
        yield repr(value).encode()
    elif isinstance(value, (bytes, bytearray)):
        yield bytes(value)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(digest(each).encode() for each in value)
    else:
        for each in _inside(value):
            yield from _parts(each, depth + 1)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield inner
    elif isinstance(value, (list, tuple)):
        yield from value
    else:
        for key, inner in sorted(getattr(value, "__dict__", {}).items()):
            yield key
            yield inner
