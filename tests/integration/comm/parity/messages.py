"""Cases: messages between two ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import distributed as dist

from integration.comm.parity.case import add, case, sample
from integration.comm.parity.reductions import DTYPES, LENGTHS, short, sizes_for


def _around(rank: int, size: int, dtype: torch.dtype, count: int) -> Any:
    """Send to the next rank what it receives from this one."""
    received = torch.zeros(count, dtype=dtype)
    work = dist.isend(sample(rank, count, dtype), (rank + 1) % size)
    source = dist.recv(received, (rank - 1) % size)
    assert work is not None
    return work.wait(), source, received


for _dtype in DTYPES:
    _part = functools.partial(_around, dtype=_dtype, count=7)
    add(f"send_recv-{short(_dtype)}", _part, family="send_recv", sizes=sizes_for(_dtype))
for _count in LENGTHS:
    _part = functools.partial(_around, dtype=torch.float32, count=_count)
    add(f"send_recv_long-{_count}", _part, family="send_recv_long")


@case
def send_to_rank_0(rank: int, size: int) -> Any:
    if rank:
        dist.send(sample(rank, 4), 0)
        return None
    received = [torch.zeros(4) for _ in range(size - 1)]
    sources = [dist.recv(tensor, src=place + 1) for place, tensor in enumerate(received)]
    return sources, received


@case
def recv_from_whomever(rank: int, size: int) -> Any:
    if rank:
        dist.send(sample(rank, 4), 0, tag=3)
        return None
    found = {}
    for _ in range(size - 1):
        tensor = torch.zeros(4)
        source = dist.recv(tensor, tag=3)
        found[source] = tensor
    return dict(sorted(found.items()))


@case
def irecv_from_whomever(rank: int, _size: int) -> Any:
    if rank == 1:
        dist.send(sample(rank, 4), 0, tag=4)  # no other: ranks are not at the same case
    if rank:
        return None
    tensor = torch.zeros(4)
    work = dist.irecv(tensor, tag=4)
    assert work is not None
    return work.wait(), work._source_rank(), tensor


@case
def tags_sort_messages(rank: int, _size: int) -> Any:
    if rank == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (5, 6, 7)]
        return [work.wait() for work in works if work is not None]
    if rank == 1:
        received = [torch.zeros(2) for _ in range(3)]
        for tensor, tag in zip(received, (7, 5, 6), strict=True):
            dist.recv(tensor, 0, tag=tag)
        return received
    return None


@case
def messages_with_one_tag_keep_their_order(rank: int, _size: int) -> Any:
    if rank == 0:
        for number in range(4):
            dist.send(torch.tensor([number]), 1, tag=9)
    if rank == 1:
        received = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
        for tensor in received:
            dist.recv(tensor, 0, tag=9)
        return received
    return None


@case
def both_receive_first(rank: int, _size: int) -> Any:
    if rank > 1:
        return None
    received = torch.zeros(4)
    receiving = dist.irecv(received, 1 - rank)
    sending = dist.isend(sample(rank, 4), 1 - rank)
    assert receiving is not None
    assert sending is not None
    return receiving.wait(), sending.wait(), received


@case
def messages_of_strided_tensors(rank: int, _size: int) -> Any:
    base = torch.zeros(3, 4)
    if rank == 0:
        dist.send(sample(rank, 12).view(3, 4).t().contiguous().t(), 1)
    if rank == 1:
        dist.recv(base.t(), 0)
    return base


@case
def messages_of_0_dim_tensors(rank: int, _size: int) -> Any:
    tensor = torch.tensor(float(rank))
    if rank == 0:
        dist.send(tensor, 1)
    if rank == 1:
        dist.recv(tensor, 0)
    return tensor


@case
def messages_of_other_shapes(rank: int, _size: int) -> Any:
    tensor = torch.zeros(2, 6)
    if rank == 0:
        dist.send(sample(rank, 12).view(3, 4), 1)
    if rank == 1:
        dist.recv(tensor, 0)
    return tensor


@case
def messages_in_a_batch(rank: int, size: int) -> Any:
    received = torch.zeros(4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sample(rank, 4), (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    return [work.wait() for work in works], received


@case
def messages_in_a_batch_by_group_rank(rank: int, size: int) -> Any:
    received = [torch.zeros(4), torch.zeros(2)]
    after, before = (rank + 1) % size, (rank - 1) % size
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received[0], group_peer=before, tag=1),
            dist.P2POp(dist.irecv, received[1], group_peer=before, tag=2),
            dist.P2POp(dist.isend, sample(rank, 2), group_peer=after, tag=2),
            dist.P2POp(dist.isend, sample(rank, 4), group_peer=after, tag=1),
        ]
    )
    for work in works:
        work.wait()
    return received


@case
def messages_by_group_rank(rank: int, size: int) -> Any:
    received = torch.zeros(4)
    work = dist.isend(sample(rank, 4), group_dst=(rank + 1) % size)
    source = dist.recv(received, group_src=(rank - 1) % size)
    assert work is not None
    work.wait()
    return source, received


@case
def messages_to_oneself(rank: int, _size: int) -> Any:
    received = torch.zeros(3)
    work = dist.isend(sample(rank, 3), rank)
    receiving = dist.irecv(received, rank)
    assert work is not None
    assert receiving is not None
    return work.wait(), receiving.wait(), received


@case
def futures_of_messages(rank: int, _size: int) -> Any:
    if rank > 1:
        return None
    tensor = sample(rank, 3)
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    assert work is not None
    work.wait()
    return work.get_future().wait()
