"""Collectives as torch's own communicators start them, by the names they have there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
)

from tmover.comm.carrier import Tensors
from tmover.comm.inbox import ANY


class OverStock:
    """Carries collectives over a communicator of torch; `works` are what it has started."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.works: list[Any] = []

    def _start(self, work: Any) -> None:
        if work is not None:
            self.works.append(work)

    def allreduce(self, tensors: Tensors, opts: Any) -> None:
        options = AllreduceOptions()
        options.reduceOp = opts.reduceOp  # those of the coalesced one are of another class
        for tensor in tensors:
            self._start(self._backend.allreduce([tensor], options))

    def broadcast(self, tensors: Tensors, opts: Any) -> None:
        for tensor in tensors:
            self._start(self._backend.broadcast([tensor], opts))

    def allgather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        options = opts or AllgatherOptions()
        for targets, tensor in zip(outs, tensors, strict=True):
            self._start(self._backend.allgather([targets], [tensor], options))

    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        options = opts or AllgatherOptions()
        for out, tensor in zip(outs, tensors, strict=True):
            self._start(self._backend._allgather_base(out, tensor, options))

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        for out, rows in zip(outs, tensors, strict=True):
            self._start(self._backend.reduce_scatter([out], [rows], opts))

    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        for out, tensor in zip(outs, tensors, strict=True):
            self._start(self._backend._reduce_scatter_base(out, tensor, opts))

    def barrier(self, opts: Any) -> None:
        self._start(self._backend.barrier(opts or BarrierOptions()))

    def gather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        self._start(self._backend.gather(outs, tensors, opts))

    def scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        self._start(self._backend.scatter(outs, tensors, opts))

    def reduce(self, tensors: Tensors, opts: Any) -> None:
        self._start(self._backend.reduce(tensors, opts))

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        self._start(self._backend.alltoall(outs, tensors, opts or AllToAllOptions()))

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        opts: Any,
    ) -> None:
        options = opts or AllToAllOptions()
        self._start(
            self._backend.alltoall_base(out, tensor, list(out_sizes), list(in_sizes), options)
        )

    def message(self, tensors: Tensors, peer: int, tag: int, *, outgoing: bool) -> None:
        """Send a tensor to a rank, or receive one from a rank or from `ANY`."""
        if outgoing:
            self._start(self._backend.send(tensors, peer, tag))
        elif peer == ANY:
            self._start(self._backend.recv_anysource(tensors, tag))
        else:
            self._start(self._backend.recv(tensors, peer, tag))
