"""Tensors as bytes, and the reductions over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tmover.errors import CallError, UnsupportedError
from tmover.memory import view as view

_DTYPES = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
            torch.float16, torch.bfloat16, torch.float32, torch.float64,
            torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
            torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
        ),
        start=1,
    )
}  # fmt: skip


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Reduction(NamedTuple):
    """How the elements of several ranks become one."""

    name: str
    code: int
    fold: Callable[[torch.Tensor, torch.Tensor], object]
    """Folds the second tensor into the first."""
    average: bool = False

    def finish(self, tensor: torch.Tensor, ranks: int) -> None:
        """Do what is left to do once all ranks are folded in."""
        if self.average:
            rounding = None if tensor.is_floating_point() or tensor.is_complex() else "trunc"
            tensor.copy_(torch.div(tensor, ranks, rounding_mode=rounding))


def _add(into: torch.Tensor, other: torch.Tensor) -> object:
    return into.add_(other)


_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (ReduceOp.SUM, Reduction("SUM", 1, _add)),
    (ReduceOp.AVG, Reduction("AVG", 2, _add, average=True)),
    (ReduceOp.PRODUCT, Reduction("PRODUCT", 3, lambda into, other: into.mul_(other))),
    (ReduceOp.MIN, Reduction("MIN", 4, lambda into, other: torch.minimum(into, other, out=into))),
    (ReduceOp.MAX, Reduction("MAX", 5, lambda into, other: torch.maximum(into, other, out=into))),
    (ReduceOp.BAND, Reduction("BAND", 6, lambda into, other: into.bitwise_and_(other))),
    (ReduceOp.BOR, Reduction("BOR", 7, lambda into, other: into.bitwise_or_(other))),
    (ReduceOp.BXOR, Reduction("BXOR", 8, lambda into, other: into.bitwise_xor_(other))),
)


def reduction_of(op: Any) -> Reduction:
    """Return the reduction torch calls `op`. Raises `CallError` if there is none here."""
    for known, reduction in _REDUCTIONS:
        if op == known:  # the other way round it is always False
            return reduction
    name = getattr(op, "op", op)
    msg = f"reduction {name} is not supported: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR"
    raise CallError(msg)


def detail_of(tensor: torch.Tensor, reduction: Reduction | None = None, root: int = 0) -> int:
    """Return what ranks must agree on besides sizes, as a number of 16 bits for the header."""
    code = _DTYPES.get(tensor.dtype, 0)
    return (root & 127) << 9 | code << 4 | (reduction.code if reduction else 0)


def device_of(tensors: Any, opts: Any) -> str:
    """Return the type of device a collective is about: its first tensor's, or the one it names.

    >>> device_of([[torch.ones(1)]], None), device_of(None, torch.distributed.BarrierOptions())
    ('cpu', 'cpu')
    """
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = tensors[0]
    device = tensors.device if isinstance(tensors, torch.Tensor) else getattr(opts, "device", None)
    return device.type if device is not None else "cpu"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself; of a functional collective's result, what that has come to.

    Raises `UnsupportedError` for other wrappers of tensors, which have no memory of their own.
    """
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        return tensor
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        result: torch.Tensor = tensor.trigger_wait()
        return result
    msg = f"a `{type(tensor).__name__}` cannot be sent: send its local part"
    raise UnsupportedError(msg)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements as a contiguous row: an alias where possible, else a copy."""
    tensor = plain(tensor)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        what = tensor.layout if tensor.layout is not torch.strided else tensor.device.type
        msg = f"collectives move dense CPU tensors only, not {what}"
        raise UnsupportedError(msg)
    if tensor.is_contiguous():
        return (
            tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)
        )
    return tensor.detach().contiguous().view(-1)


def give_back(row: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the row back into the tensor it was made from, if it is not an alias of it."""
    if row is not tensor and row.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(row.view(tensor.shape))


def parts(row: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split a row into `count` equal parts. Raises `CallError` if it has no such."""
    width = row.numel() // count
    if width * count != row.numel():
        msg = f"a tensor of {row.numel()} elements cannot be split over {count} ranks"
        raise CallError(msg)
    return [row[i * width : (i + 1) * width] for i in range(count)]


def portions(tensor: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
    """Split a tensor along its first dimension, evenly if no sizes are given."""
    row = flat(tensor)
    if not sizes:
        return parts(row, count)
    width = row.numel() // max(1, tensor.shape[0])
    return list(torch.split(row, [size * width for size in sizes]))
