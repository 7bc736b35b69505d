"""Answers without peers: valid values of the right shape, at once.

What a rehearsal computes with them is thrown away; it only has to run. A reduction leaves the own
tensor as it is, a gathering repeats it, a scattering takes the own part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Tensors = list[torch.Tensor]


class Witness(Protocol):
    """Who notes what would have been said."""

    def note(self, operation: str, ranks: Sequence[int], value: Any) -> None:
        """Note a word to those ranks of the world."""

    def over(self, carrier: Any, ranks: Sequence[int]) -> Any:
        """Return what does as `carrier`, and notes what is put into each collective."""


class Answers:
    """Carries collectives out without any peer, as rank `rank`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def allreduce(self, tensors: Tensors, opts: Any) -> None:
        """Leave the tensors: each is its own result."""

    broadcast = reduce = allreduce

    def barrier(self, opts: Any) -> None:
        """Return: there is nobody to wait for."""

    def allgather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        for targets, tensor in zip(outs, tensors, strict=True):
            repeat(targets, tensor)

    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        for out, tensor in zip(outs, tensors, strict=True):
            repeat_into(out, tensor)

    def gather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> None:
        repeat(outs[0] if outs else [], tensors[0])

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        for out, rows in zip(outs, tensors, strict=True):
            take(out, rows, self._rank)

    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        for out, tensor in zip(outs, tensors, strict=True):
            take_from(out, tensor, self._rank)

    def scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> None:
        take(outs[0], tensors[0] if tensors else [], self._rank)

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any) -> None:
        for rank, out in enumerate(outs):
            take(out, tensors, rank)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        opts: Any,
    ) -> None:
        repeat_into(out, tensor)


def repeat(outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Answer a gathering: everybody has what this rank has."""
    for out in outs:
        if out.numel() == tensor.numel():
            out.detach().copy_(tensor.detach().view(out.shape))
        else:
            out.detach().zero_()


def repeat_into(out: torch.Tensor, tensor: torch.Tensor) -> None:
    """Answer a gathering into one tensor."""
    count = max(1, out.numel() // max(1, tensor.numel()))
    if out.numel() == count * tensor.numel():
        repeated = tensor.detach().reshape(1, -1).expand(count, -1)
        out.detach().copy_(repeated.reshape(out.shape))
    else:
        out.detach().zero_()


def take(out: torch.Tensor, tensors: Sequence[torch.Tensor], rank: int) -> None:
    """Answer a scattering: this rank gets its own part."""
    if len(tensors) > rank and tensors[rank].numel() == out.numel():
        out.detach().copy_(tensors[rank].detach().view(out.shape))
    else:
        out.detach().zero_()


def take_from(out: torch.Tensor, tensor: torch.Tensor, rank: int) -> None:
    """Answer a scattering out of one tensor."""
    take(out, torch.split(tensor.detach().reshape(-1), max(1, out.numel())), rank)


def invent(tensors: Sequence[torch.Tensor]) -> None:
    """Answer a receive with ones: yes where ranks ask each other, and a size that exists."""
    for tensor in tensors:
        tensor.detach().fill_(1)
