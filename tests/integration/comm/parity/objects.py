"""Cases: Python objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from integration.comm.parity.case import case, sample


def thing(rank: int) -> Any:
    """Return an object whose pickle is longer for every rank."""
    return {"rank": rank, "text": "x" * 100 * rank, "nested": [(rank,), None, 1.5]}


@case
def broadcast_object_list(rank: int, _size: int) -> Any:
    objects = [thing(1), "word", None] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(objects, src=1)
    return objects


@case
def broadcast_object_list_by_group_rank(rank: int, _size: int) -> Any:
    objects = [thing(rank)]
    dist.broadcast_object_list(objects, group_src=0, device=torch.device("cpu"))
    return objects


@case
def broadcast_object_list_of_tensors(rank: int, _size: int) -> Any:
    objects = [sample(rank, 5)]
    dist.broadcast_object_list(objects, src=0, group=dist.group.WORLD)
    return objects


@case
def broadcast_object_list_without_a_source(rank: int, _size: int) -> Any:
    objects = [thing(rank)]
    dist.broadcast_object_list(objects)
    return objects


@case
def all_gather_object(rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, thing(rank))
    return gathered


@case
def all_gather_object_long(rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, ("y" * 200_000, rank), group=dist.group.WORLD)
    return [(len(text), place) for text, place in gathered]


@case
def gather_object(rank: int, size: int) -> Any:
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(thing(rank), gathered, dst=1)
    return gathered


@case
def gather_object_by_group_rank(rank: int, size: int) -> Any:
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(thing(rank), gathered, group_dst=0)
    return gathered


@case
def gather_object_without_a_list(rank: int, _size: int) -> Any:
    dist.gather_object(thing(rank), None, dst=rank)


@case
def scatter_object_list(rank: int, size: int) -> Any:
    mine: list[Any] = [None]
    every = [thing(place) for place in range(size)] if rank == 1 else None
    dist.scatter_object_list(mine, every, 1)
    return mine


@case
def scatter_object_list_by_group_rank(rank: int, size: int) -> Any:
    mine: list[Any] = [None, "kept"]
    every = [thing(place) for place in range(size)] if rank == 0 else None
    dist.scatter_object_list(mine, every, group_src=0)
    return mine


@case
def scatter_object_list_into_nothing(_rank: int, size: int) -> Any:
    dist.scatter_object_list([], [None] * size, src=0)


@case
def object_lists_as_messages(rank: int, size: int) -> Any:
    if rank == 0:
        for other in range(1, size):
            dist.send_object_list([thing(other), "word"], dst=other)
        return None
    received: list[Any] = [None, None]
    source = dist.recv_object_list(received, src=0)
    return source, received


@case
def object_lists_as_messages_by_group_rank(rank: int, _size: int) -> Any:
    received: list[Any] = [None]
    cpu = torch.device("cpu")
    if rank == 0:
        dist.send_object_list([thing(3)], group_dst=1, device=cpu)
    if rank == 1:
        source = dist.recv_object_list(received, group_src=0, device=cpu)
        return source, received
    return None


@case
def object_lists_as_batched_messages(rank: int, _size: int) -> Any:
    received: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([thing(2)], dst=1, use_batch=True)
    if rank == 1:
        source = dist.recv_object_list(received, src=0, use_batch=True)
        return source, received
    return None


@case
def object_lists_to_oneself(rank: int, _size: int) -> Any:
    dist.send_object_list(["word"], dst=rank)


@case
def objects_that_cannot_be_pickled(_rank: int, size: int) -> Any:
    dist.all_gather_object([None] * size, lambda: None)
