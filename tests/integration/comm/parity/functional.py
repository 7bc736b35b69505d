"""Cases: functional collectives, eager and compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from integration.comm.parity.case import case, case_for, sample


def world() -> Any:
    return dist.group.WORLD


@case
def functional_reductions(rank: int, size: int) -> Any:
    return [
        functional.all_reduce(sample(rank, 4), "sum", world()),
        functional.all_reduce(sample(rank, 4), "avg", list(range(size))),
        functional.all_reduce(sample(rank, 4), "max", world().group_name),
        *functional.all_reduce_coalesced([sample(rank, 3), sample(rank, 5)], "sum", world()),
        functional.reduce_scatter_tensor(sample(rank, 2 * size), "sum", 0, world()),
        functional.reduce_scatter_tensor(sample(rank, 4 * size).view(2, -1), "sum", 1, world()),
        *functional.reduce_scatter_tensor_coalesced(
            [sample(rank, size), sample(rank, 3 * size)], "sum", [0, 0], world()
        ),
    ]


@case
def functional_gatherings(rank: int, _size: int) -> Any:
    return [
        functional.broadcast(sample(rank, 4), 1, world()),
        functional.all_gather_tensor(sample(rank, 4), 0, world()),
        functional.all_gather_tensor(sample(rank, 6).view(2, 3), 1, world()),
        *functional.all_gather_into_tensor_coalesced([sample(rank, 2), sample(rank, 3)], world()),
    ]


@case
def functional_exchanges(rank: int, size: int) -> Any:
    given = [place + 1 for place in range(size)]
    return [
        functional.all_to_all_single(sample(rank, 2 * size), None, None, world()),
        functional.all_to_all_single(sample(rank, sum(given)), [rank + 1] * size, given, world()),
        functional.permute_tensor(
            sample(rank, 3), [(place + 1) % size for place in range(size)], world()
        ),
    ]


@case
def functional_with_gradients(rank: int, size: int) -> Any:
    leaf = sample(rank, 2 * size).requires_grad_()
    shard = functional.reduce_scatter_tensor_autograd(leaf, "sum", 0, world())
    whole = functional.all_gather_tensor_autograd(shard * 2, 0, world())
    moved = functional.all_to_all_single_autograd(whole, None, None, world())
    (gradient,) = torch.autograd.grad(moved.sum(), leaf)
    return moved, gradient


def step(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    group = world()
    reduced = functional.all_reduce(tensor * 2, "sum", group)
    gathered = functional.all_gather_tensor(reduced + 1, 0, group)
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    moved = functional.all_to_all_single(gathered, None, None, group)
    return reduced, gathered, scattered, moved


def _in_place(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = tensor + 1
    dist.all_reduce(total)
    whole = torch.zeros(total.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(whole, total)
    return total, whole


@case_for(2, 3)
def functional_compiled(rank: int, _size: int) -> Any:
    return torch.compile(step, backend="aot_eager", fullgraph=True)(sample(rank, 4))


@case_for(2)
def plain_collectives_compiled(rank: int, _size: int) -> Any:
    return torch.compile(_in_place, backend="aot_eager", fullgraph=True)(sample(rank, 4))
