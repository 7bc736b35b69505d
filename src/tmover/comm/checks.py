"""What one rank alone can see to be wrong with a call, found before anything is sent.

So that nobody waits for a rank that has raised, and a rehearsal refuses what training would. What
only a comparison between ranks shows is noticed on arrival instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tmover.comm.tensors import reduction_of
from tmover.errors import CallError, CallTypeError, UnsupportedError

Tensors = list[torch.Tensor]
TAG_LIMIT = 1 << 32
_BITWISE = ("BAND", "BOR", "BXOR")
_UNFOLDED = frozenset(
    {torch.uint16, torch.uint32, torch.uint64}
    | {getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_"))}
)
"""Types whose elements move, but that torch cannot add on a CPU."""


class Placed(Protocol):
    """Who asks: a rank of a group."""

    @property
    def is_answered_for_another(self) -> bool:
        """Whether what comes may be what another rank has got, as in a rehearsal."""

    def rank(self) -> int:
        """Return this process's rank in the group."""

    def size(self) -> int:
        """Return the number of ranks."""


class Checks:
    """The checks of one group. Each raises a `CallError` that says what to change."""

    def __init__(self, group: Placed) -> None:
        self._group = group

    # --- collectives ------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, op: Any) -> None:
        """Check tensors that are reduced in place, or one that is sparse."""
        call = "all_reduce"
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            self._reducible(call, op, tensors[0].dtype)
            if reduction_of(op).name != "SUM":
                msg = "sparse tensors can only be summed: use ReduceOp.SUM, or to_dense()"
                raise self._wrong(call, msg)
        else:
            self.coalesced(tensors, op)

    def coalesced(self, tensors: Tensors, op: Any) -> None:
        """Check dense tensors that are reduced in place."""
        self._some("all_reduce", tensors)
        self._alike("all_reduce", "tensor", tensors)
        self._writable("all_reduce", tensors)
        self._reducible("all_reduce", op, tensors[0].dtype)

    def reduce(self, tensors: Tensors, op: Any, root: int) -> None:
        """Check a tensor that is reduced on the root."""
        self._rooted("reduce", tensors, root)
        self._reducible("reduce", op, tensors[0].dtype)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        """Check tensors that become those of the root."""
        self._rooted("broadcast", tensors, root)

    def _rooted(self, call: str, tensors: Tensors, root: int) -> None:
        self._some(call, tensors)
        self._alike(call, "tensor", tensors)
        self._writable(call, tensors)
        self._root(call, root)

    def allgather(self, outs: list[Tensors], tensors: Tensors) -> None:
        """Check tensors that are gathered into one list each."""
        call = "all_gather"
        self._some(call, tensors)
        if len(outs) != len(tensors):
            msg = f"{len(tensors)} tensors to gather, but {len(outs)} lists to gather them into"
            raise self._wrong(call, msg)
        for targets, tensor in zip(outs, tensors, strict=True):
            self._list(call, "output", targets, tensor)

    def turned(self, outs: list[Tensors], tensors: Tensors) -> list[Tensors]:
        """Check tensors of which `outs[r]` are those of rank r; return a list for each tensor."""
        call = "all_gather_coalesced"
        self._some(call, tensors)
        if len(outs) != self._group.size() or any(len(row) != len(tensors) for row in outs):
            msg = f"{self._group.size()} output lists of {len(tensors)} tensors each are needed"
            raise self._wrong(call, msg)
        turned = [list(targets) for targets in zip(*outs, strict=True)]
        self.allgather(turned, tensors)
        return turned

    def all_gather_single(self, outs: Tensors, tensors: Tensors) -> None:
        """Check tensors that are gathered into one tensor each."""
        self._singles("all_gather_single", "output", outs, "input", tensors)
        self._writable("all_gather_single", outs)

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], op: Any) -> None:
        """Check lists of tensors that are reduced, one for each rank."""
        call = "reduce_scatter"
        self._some(call, outs)
        for out, rows in zip(outs, tensors, strict=True):
            self._list(call, "input", rows, out, writable=False)
            self._writable(call, [out])
            self._reducible(call, op, out.dtype)

    def reduce_scatter_single(self, outs: Tensors, tensors: Tensors, op: Any) -> None:
        """Check tensors that are reduced and split over the ranks."""
        call = "reduce_scatter_single"
        self._singles(call, "input", tensors, "output", outs)
        self._writable(call, outs)
        for out in outs:
            self._reducible(call, op, out.dtype)

    def gather(self, outs: list[Tensors], tensors: Tensors, root: int) -> None:
        """Check a tensor that is gathered on the root."""
        self._on_root("gather", "output", outs, tensors[0], root)

    def scatter(self, outs: Tensors, tensors: list[Tensors], root: int) -> None:
        """Check tensors that the root has, one for each rank."""
        self._on_root("scatter", "input", tensors, outs[0], root)
        self._writable("scatter", outs)

    def _on_root(
        self, call: str, what: str, lists: list[Tensors], own: torch.Tensor, root: int
    ) -> None:
        self._root(call, root)
        self._alike(call, "tensor", [own])
        if self._group.rank() == root:
            self._list(call, what, lists[0] if lists else [], own, writable=what == "output")

    def alltoall(self, outs: Tensors, tensors: Tensors) -> None:
        """Check lists of tensors, one for each rank."""
        call, rank = "all_to_all", self._group.rank()
        self._some(call, [*outs, *tensors])
        self._count(call, "input", tensors)
        self._count(call, "output", outs)
        self._alike(call, "tensor", [*outs, *tensors])
        self._writable(call, outs)
        if not self._group.is_answered_for_another:
            self._own(call, "output", outs[rank], tensors[rank].numel())

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
    ) -> None:
        """Check tensors that are split along their first dimension."""
        call = "all_to_all_single"
        self._alike(call, "tensor", [out, tensor])
        self._writable(call, [out])
        leaves = self._split(call, "input", tensor, in_sizes)
        comes = self._split(call, "output", out, out_sizes)
        if leaves != comes and not self._group.is_answered_for_another:
            msg = f"its own part has {leaves} elements in the input, {comes} in the output"
            raise self._wrong(call, msg)

    def _split(self, call: str, what: str, tensor: torch.Tensor, sizes: Sequence[int]) -> int:
        """Check how a tensor is split; return how many elements go to this rank itself."""
        ranks = self._group.size()
        if tensor.dim() == 0:
            raise self._wrong(call, f"the {what} has no dimension to split: use view(1)")
        length = tensor.shape[0]
        width = tensor.numel() // max(1, length)
        if not sizes:
            if length % ranks:
                msg = f"the {what}'s first dimension, {length}, is no multiple of {ranks}: give "
                raise self._wrong(call, f"{msg}{what}_split_sizes")
            return length // ranks * width
        if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != length:
            msg = (
                f"{what}_split_sizes {list(sizes)} do not split a first dimension of {length} over "
                f"{ranks} ranks: give one size for each rank, which add up to it"
            )
            raise self._wrong(call, msg)
        return sizes[self._group.rank()] * width

    # --- messages ---------------------------------------------------------------------------------

    def message(self, call: str, tensors: Tensors, peer: int, tag: Any) -> None:
        """Check a message to or from `peer`; -1 is whichever rank."""
        self._alike(call, "tensor", tensors)
        if call == "recv":
            self._writable(call, tensors)
        if not isinstance(tag, int) or tag >= TAG_LIMIT:
            msg = f"{call}: tag {tag!r}: tags are whole numbers from 0 to {TAG_LIMIT - 1}"
            raise CallTypeError(msg)
        if tag < 0:
            raise self._wrong(call, f"tag {tag}: tags are not negative")
        if not (-1 if call == "recv" else 0) <= peer < self._group.size():
            raise self._wrong(call, f"there is no rank {peer} in a group of {self._group.size()}")

    # --- what they are made of --------------------------------------------------------------------

    def _wrong(self, call: str, what: str) -> CallError:
        return CallError(self._where(call) + what)

    def _where(self, call: str) -> str:
        return f"{call} on rank {self._group.rank()}: "

    def _some(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors:
            raise UnsupportedError(self._where(call) + "there is no tensor to work on")

    def _root(self, call: str, root: int) -> None:
        if not 0 <= root < self._group.size():
            msg = f"there is no rank {root} in a group of {self._group.size()} to be the root"
            raise self._wrong(call, msg)

    def _alike(self, call: str, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Check that all are dense, on the CPU, and of one type."""
        dtype = tensors[0].dtype
        for place, tensor in enumerate(tensors):
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                odd = tensor.layout if tensor.layout is not torch.strided else tensor.device
                odd_one = f"{what} {place} is {odd}: only dense tensors on the CPU are moved"
                raise UnsupportedError(self._where(call) + odd_one)
            if tensor.is_quantized:
                odd_one = f"{what} {place} is quantized: move its int_repr()"
                raise UnsupportedError(self._where(call) + odd_one)
            if tensor.dtype is not dtype:
                msg = f"{what} {place} is {tensor.dtype}, {what} 0 is {dtype}: use one type"
                raise self._wrong(call, msg)

    def _writable(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        for place, tensor in enumerate(tensors):
            if not tensor.is_contiguous() and any(
                step == 0 and length > 1
                for step, length in zip(tensor.stride(), tensor.shape, strict=True)
            ):
                msg = f"elements of tensor {place} share memory (expand?): pass a clone() of it"
                raise self._wrong(call, msg)

    def _count(self, call: str, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._group.size():
            msg = f"{len(tensors)} {what} tensors for {self._group.size()} ranks: give one for each"
            raise self._wrong(call, msg)

    def _own(self, call: str, what: str, tensor: torch.Tensor, count: int) -> None:
        if tensor.numel() != count:
            msg = f"its own {what} tensor has {tensor.numel()} elements, {count} belong there"
            raise self._wrong(call, msg)

    def _list(
        self,
        call: str,
        what: str,
        tensors: Tensors,
        own: torch.Tensor,
        *,
        writable: bool = True,
    ) -> None:
        """Check a list with one tensor for each rank. Only that of this rank has a known size."""
        self._count(call, what, tensors)
        self._alike(call, f"{what} tensor", [*tensors, own])
        if writable:
            self._writable(call, tensors)
        self._own(call, what, tensors[self._group.rank()], own.numel())

    def _singles(
        self, call: str, whole: str, wholes: Tensors, part: str, own_parts: Tensors
    ) -> None:
        """Check tensors, each of which holds a part for every rank."""
        self._some(call, own_parts)
        ranks = self._group.size()
        for tensor, own in zip(wholes, own_parts, strict=True):
            self._alike(call, "tensor", [tensor, own])
            if tensor.numel() != own.numel() * ranks:
                msg = (
                    f"the {whole} has {tensor.numel()} elements, the {part} {own.numel()}: over "
                    f"{ranks} ranks it takes {own.numel() * ranks}"
                )
                raise self._wrong(call, msg)

    def _reducible(self, call: str, op: Any, dtype: torch.dtype) -> None:
        name = reduction_of(op).name
        plain = not (dtype.is_floating_point or dtype.is_complex)
        if (
            dtype in _UNFOLDED
            or (name in _BITWISE and not plain)
            or (name == "AVG" and dtype is torch.bool)
            or (dtype.is_complex and name not in ("SUM", "AVG"))
        ):
            raise self._wrong(call, f"no {name} over elements of {dtype}: use another type")
