"""What a collective is, learnt by asking it of a carrier that carries nothing out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tmover.comm.carrier import Carrier, Tensors


class Asked:
    """Takes note of the operation, and of the tensors that hold its outcome on this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.op = ""
        self.outs: Tensors = []
        self.is_source = False
        """Whether they held it before, and are only read: the root's of a broadcast."""

    def _note(self, op: str, outs: Sequence[torch.Tensor]) -> None:
        self.op, self.outs = op, list(outs)

    def allreduce(self, tensors: Tensors, opts: Any) -> None:
        self._note("allreduce", tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> None:
        self._note("broadcast", tensors)
        self.is_source = opts.rootRank == self._rank

    def reduce(self, tensors: Tensors, opts: Any) -> None:
        self._note("reduce", tensors if opts.rootRank == self._rank else [])

    def barrier(self, opts: Any) -> None:
        self._note("barrier", [])

    def allgather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        self._note("allgather", [out for targets in outs for out in targets])

    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        self._note("all_gather_single", outs)

    def gather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        self._note("gather", [out for targets in outs for out in targets])

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        self._note("reduce_scatter", outs)

    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        self._note("reduce_scatter_single", outs)

    def scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        self._note("scatter", outs)

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        self._note("alltoall", outs)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        opts: Any,
    ) -> None:
        self._note("all_to_all_single", [out])


def learn(ask: Callable[[Carrier], None], rank: int) -> Asked:
    """Return what a collective is, on this rank of its group."""
    asked = Asked(rank)
    ask(asked)
    return asked
