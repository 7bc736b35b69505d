"""What a case of the parity suite is: one use of `torch.distributed`, the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Body = Callable[[int, int], Any]
"""Takes a rank and the world's size; returns what the rank has got."""

SIZES = (2, 3, 4, 5, 8)
SHOWN = 64
"""Tensors up to this length are compared number by number, longer ones by a hash."""


class Case(NamedTuple):
    """A case, and the sizes of worlds it makes sense in."""

    name: str
    body: Body
    family: str
    """Cases of one family are one test."""
    sizes: tuple[int, ...]


class Failure(NamedTuple):
    """What a case has raised, as far as a script can tell."""

    kinds: tuple[str, ...]
    """The built-in classes it is an instance of, the nearest first."""
    text: str
    """The first line."""
    ours: bool
    """Whether it is one of tmover's errors."""


CASES: dict[str, Case] = {}


def add(name: str, body: Body, *, family: str = "", sizes: tuple[int, ...] = SIZES) -> None:
    """Add a case to the suite."""
    assert name not in CASES, name
    CASES[name] = Case(name, body, family or name, sizes)


def case(body: Body) -> Body:
    """Add a case that is named after its function."""
    add(body.__name__, body)
    return body


def case_for(*sizes: int) -> Callable[[Body], Body]:
    """Add a case that is named after its function, for worlds of these sizes."""

    def register(body: Body) -> Body:
        add(body.__name__, body, sizes=sizes)
        return body

    return register


def sample(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small whole numbers, so that sums and products are exact in every type and order."""
    values = (torch.arange(count) * 3 + rank) % 5
    if dtype.is_signed and dtype.itemsize > 1:
        values = values - 2
    if dtype.is_complex:
        return torch.complex(values.double(), values.double().flip(0)).to(dtype)
    return values.to(dtype)


def plain(value: Any) -> Any:
    """Return a result as something that can be compared and sent through a pipe."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        return str(tensor.dtype), tuple(tensor.shape), _contents(tensor)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _contents(tensor: torch.Tensor) -> Any:
    if tensor.numel() > SHOWN:
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(raw).hexdigest()
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.float()
    return tensor.tolist()
