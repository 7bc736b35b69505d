"""Answers without peers: valid values of the right shape, at once.

What a rehearsal computes with them is thrown away; it only has to run. A reduction leaves the own
tensor as it is, a gathering repeats it, a scattering takes the own part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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


def pair(outs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Answer an exchange: what goes out comes in."""
    for rank, out in enumerate(outs):
        take(out, tensors, rank)


def blank(tensors: Sequence[torch.Tensor]) -> None:
    """Answer a receive."""
    for tensor in tensors:
        tensor.detach().zero_()
