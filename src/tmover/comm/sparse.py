"""Sparse tensors: each rank has elements in other places, so all are gathered and then summed."""

from __future__ import annotations

import torch

from tmover.comm import collectives
from tmover.comm.mesh import Mesh
from tmover.comm.tensors import flat
from tmover.errors import ProtocolError


def all_reduce(mesh: Mesh, tensor: torch.Tensor) -> None:
    """Sum a sparse COO tensor over all ranks, in place and in the order of ranks."""
    own = tensor.detach().coalesce()
    counts = _counts(mesh, own)
    depth, rest = own.sparse_dim(), own.values().shape[1:]
    indices = [torch.empty(depth, count, dtype=torch.int64) for count in counts]
    values = [torch.empty(count, *rest, dtype=own.dtype) for count in counts]
    collectives.all_gather(mesh, [flat(row) for row in indices], flat(own.indices()))
    collectives.all_gather(mesh, [flat(row) for row in values], flat(own.values()))
    total = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), own.shape, check_invariants=False
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())  # a detached sparse tensor is a copy


def _counts(mesh: Mesh, own: torch.Tensor) -> list[int]:
    """Return how many elements each rank has. Raises `ProtocolError` if shapes differ."""
    facts = torch.tensor([own._nnz(), own.sparse_dim(), *own.shape])
    heard = [torch.empty_like(facts) for _ in range(mesh.size)]
    collectives.all_gather(mesh, heard, facts)
    for rank, row in enumerate(heard):
        if not torch.equal(row[1:], facts[1:]):
            msg = (
                f"ranks do different things: rank {rank} sums a sparse tensor of shape "
                f"{row[2:].tolist()}, this rank one of shape {list(own.shape)}"
            )
            raise ProtocolError(msg)
    return [int(row[0]) for row in heard]
