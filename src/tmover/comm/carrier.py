"""What carries a group's collectives: links, another communicator, or nobody at all.

All carriers have the methods of torch's process groups, by the same names; the group asks
whichever is there at the moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tmover.comm import collectives, sparse
from tmover.comm.mesh import Mesh
from tmover.comm.tensors import flat, give_back, parts, portions, reduction_of

Tensors = list[torch.Tensor]


class Carrier(Protocol):
    """Carries collectives out. What each means is said at `TmoverGroup`."""

    def allreduce(self, tensors: Tensors, opts: Any) -> None:
        """Reduce each tensor over all ranks."""

    def broadcast(self, tensors: Tensors, opts: Any) -> None:
        """Make each tensor that of the root."""

    def allgather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        """Gather each tensor from all ranks into a list."""

    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        """Gather each tensor from all ranks into one."""

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        """Reduce lists of tensors over all ranks; each rank gets its place in them."""

    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        """Reduce several tensors over all ranks; each rank gets its part of each."""

    def barrier(self, opts: Any) -> None:
        """Return once every rank has come here."""

    def gather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        """Gather a tensor from all ranks, on the root."""

    def scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        """Give each rank the tensor that the root has for it."""

    def reduce(self, tensors: Tensors, opts: Any) -> None:
        """Reduce a tensor over all ranks, on the root."""

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        """Give each rank the tensor this one has for it, and get one from each."""

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        opts: Any,
    ) -> None:
        """Give each rank its part of a tensor, and get one part from each."""


class OverLinks:
    """Carries collectives over our own links. Returns when done."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def allreduce(self, tensors: Tensors, opts: Any) -> None:
        reduction = reduction_of(opts.reduceOp)
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo:
                sparse.all_reduce(self._mesh, tensor)
                continue
            row = flat(tensor)
            collectives.all_reduce(self._mesh, row, reduction)
            give_back(row, tensor)

    def broadcast(self, tensors: Tensors, opts: Any) -> None:
        for tensor in tensors:
            row = flat(tensor)
            collectives.broadcast(self._mesh, row, opts.rootRank)
            give_back(row, tensor)

    def allgather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        for targets, tensor in zip(outs, tensors, strict=True):
            rows = [flat(target) for target in targets]
            collectives.all_gather(self._mesh, rows, flat(tensor))
            _give_all_back(rows, targets)

    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        for out, tensor in zip(outs, tensors, strict=True):
            whole = flat(out)
            collectives.all_gather(self._mesh, parts(whole, self._mesh.size), flat(tensor))
            give_back(whole, out)

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        reduction = reduction_of(opts.reduceOp)
        for out, rows in zip(outs, tensors, strict=True):
            row = flat(out)
            collectives.reduce_scatter(self._mesh, row, [flat(part) for part in rows], reduction)
            give_back(row, out)

    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        reduction = reduction_of(opts.reduceOp)
        for out, tensor in zip(outs, tensors, strict=True):
            row = flat(out)
            rows = parts(flat(tensor), self._mesh.size)
            collectives.reduce_scatter(self._mesh, row, rows, reduction)
            give_back(row, out)

    def barrier(self, opts: Any) -> None:
        collectives.barrier(self._mesh)

    def gather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        targets = outs[0] if outs else []
        rows = [flat(target) for target in targets]
        collectives.gather(self._mesh, rows, flat(tensors[0]), opts.rootRank)
        _give_all_back(rows, targets)

    def scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        row = flat(outs[0])
        rows = [flat(part) for part in tensors[0]] if tensors else []
        collectives.scatter(self._mesh, row, rows, opts.rootRank)
        give_back(row, outs[0])

    def reduce(self, tensors: Tensors, opts: Any) -> None:
        row = flat(tensors[0]).clone()
        collectives.reduce(self._mesh, row, reduction_of(opts.reduceOp), opts.rootRank)
        if self._mesh.rank == opts.rootRank:
            give_back(row, tensors[0])

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        rows = [flat(out) for out in outs]
        collectives.all_to_all(self._mesh, rows, [flat(tensor) for tensor in tensors])
        _give_all_back(rows, outs)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        opts: Any,
    ) -> None:
        whole = flat(out)
        targets = portions(whole.view(out.shape), out_sizes, self._mesh.size)
        collectives.all_to_all(self._mesh, targets, portions(tensor, in_sizes, self._mesh.size))
        give_back(whole, out)


def _give_all_back(rows: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for row, tensor in zip(rows, tensors, strict=True):
        give_back(row, tensor)
