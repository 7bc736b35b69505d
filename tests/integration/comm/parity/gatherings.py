"""Cases: what gathers, scatters and broadcasts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import distributed as dist

from integration.comm.parity.case import add, case, sample
from integration.comm.parity.reductions import DTYPES, LENGTHS, short, sizes_for


def _broadcast(rank: int, _size: int, dtype: torch.dtype) -> Any:
    tensor = sample(rank, 7, dtype)
    dist.broadcast(tensor, 1)
    return tensor


def _all_gather(rank: int, size: int, dtype: torch.dtype) -> Any:
    outs = [torch.zeros(7, dtype=dtype) for _ in range(size)]
    dist.all_gather(outs, sample(rank, 7, dtype))
    return outs


def _all_gather_into_tensor(rank: int, size: int, dtype: torch.dtype) -> Any:
    out = torch.zeros(7 * size, dtype=dtype)
    dist.all_gather_into_tensor(out, sample(rank, 7, dtype))
    return out


def _gather(rank: int, size: int, dtype: torch.dtype) -> Any:
    outs = [torch.zeros(7, dtype=dtype) for _ in range(size)] if rank == 1 else None
    dist.gather(sample(rank, 7, dtype), outs, dst=1)
    return outs


def _scatter(rank: int, size: int, dtype: torch.dtype) -> Any:
    out = torch.zeros(7, dtype=dtype)
    rows = [sample(place, 7, dtype) for place in range(size)] if rank == 1 else None
    dist.scatter(out, rows, src=1)
    return out


def _broadcast_long(rank: int, _size: int, count: int) -> Any:
    tensor = sample(rank, count)
    dist.broadcast(tensor, 0)
    return tensor


def _all_gather_long(rank: int, size: int, count: int) -> Any:
    outs = [torch.zeros(count) for _ in range(size)]
    dist.all_gather(outs, sample(rank, count))
    return outs


def _all_gather_into_tensor_long(rank: int, size: int, count: int) -> Any:
    out = torch.zeros(count * size)
    dist.all_gather_into_tensor(out, sample(rank, count))
    return out


def _gather_long(rank: int, size: int, count: int) -> Any:
    outs = [torch.zeros(count) for _ in range(size)] if rank == 0 else None
    dist.gather(sample(rank, count), outs)
    return outs


def _scatter_long(rank: int, size: int, count: int) -> Any:
    out = torch.zeros(count)
    dist.scatter(out, [sample(place, count) for place in range(size)] if rank == 0 else None)
    return out


for _body in (_broadcast, _all_gather, _all_gather_into_tensor, _gather, _scatter):
    for _dtype in DTYPES:
        _family = _body.__name__[1:]
        _part = functools.partial(_body, dtype=_dtype)
        add(f"{_family}-{short(_dtype)}", _part, family=_family, sizes=sizes_for(_dtype))
for _long in (
    _broadcast_long,
    _all_gather_long,
    _all_gather_into_tensor_long,
    _gather_long,
    _scatter_long,
):
    for _count in LENGTHS:
        _family = _long.__name__[1:]
        add(f"{_family}-{_count}", functools.partial(_long, count=_count), family=_family)


@case
def broadcast_from_everybody(rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        tensor = sample(rank, 4)
        dist.broadcast(tensor, group_src=root)
        results.append(tensor)
    return results


@case
def broadcast_strided(rank: int, _size: int) -> Any:
    base = sample(rank, 12).view(3, 4)
    dist.broadcast(base.t(), 0)
    return base


@case
def broadcast_0_dim(rank: int, _size: int) -> Any:
    tensor = torch.tensor(rank + 5)
    dist.broadcast(tensor, 1)
    return tensor


@case
def broadcast_other_shapes(rank: int, _size: int) -> Any:
    tensor = sample(rank, 12).view(3, 4) if rank == 0 else sample(rank, 12).view(2, 6)
    dist.broadcast(tensor, 0)
    return tensor


@case
def broadcast_async(rank: int, _size: int) -> Any:
    tensor = sample(rank, 4)
    work = dist.broadcast(tensor, 1, async_op=True)
    assert work is not None
    return work.wait(), tensor, work.get_future().wait()


@case
def all_gather_2_d(rank: int, size: int) -> Any:
    outs = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(outs, sample(rank, 6).view(2, 3))
    return outs


@case
def all_gather_0_dim(rank: int, size: int) -> Any:
    outs = [torch.tensor(0.0) for _ in range(size)]
    dist.all_gather(outs, torch.tensor(float(rank)))
    return outs


@case
def all_gather_input_strided(rank: int, size: int) -> Any:
    outs = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(outs, sample(rank, 8)[::2])
    return outs


@case
def all_gather_input_transposed(rank: int, size: int) -> Any:
    outs = [torch.zeros(4, 3) for _ in range(size)]
    dist.all_gather(outs, sample(rank, 12).view(3, 4).t())
    return outs


@case
def all_gather_outputs_transposed(rank: int, size: int) -> Any:
    bases = [torch.zeros(3, 4) for _ in range(size)]
    dist.all_gather([base.t() for base in bases], sample(rank, 12).view(4, 3))
    return bases


@case
def all_gather_outputs_in_one_base(rank: int, size: int) -> Any:
    base = torch.zeros(size, 4)
    dist.all_gather(list(base.unbind()), sample(rank, 4))
    return base


@case
def all_gather_async(rank: int, size: int) -> Any:
    outs = [torch.zeros(4) for _ in range(size)]
    work = dist.all_gather(outs, sample(rank, 4), async_op=True)
    assert work is not None
    return work.wait(), outs, work.get_future().wait()


@case
def all_gather_uneven(rank: int, size: int) -> Any:
    outs = [torch.zeros(place + 1) for place in range(size)]
    dist.all_gather(outs, sample(rank, rank + 1))
    return outs


@case
def all_gather_into_tensor_stacked(rank: int, size: int) -> Any:
    out = torch.zeros(size, 4)
    dist.all_gather_into_tensor(out, sample(rank, 4))
    return out


@case
def all_gather_into_tensor_concatenated(rank: int, size: int) -> Any:
    out = torch.zeros(2 * size, 3)
    dist.all_gather_into_tensor(out, sample(rank, 6).view(2, 3))
    return out


@case
def all_gather_into_tensor_0_dim(rank: int, size: int) -> Any:
    out = torch.zeros(size)
    dist.all_gather_into_tensor(out, torch.tensor(float(rank)))
    return out


@case
def all_gather_into_tensor_input_strided(rank: int, size: int) -> Any:
    out = torch.zeros(4 * size)
    dist.all_gather_into_tensor(out, sample(rank, 8)[::2])
    return out


@case
def all_gather_into_tensor_output_strided(rank: int, size: int) -> Any:
    base = torch.zeros(8 * size)
    dist.all_gather_into_tensor(base[::2], sample(rank, 4))
    return base


@case
def all_gather_single(rank: int, size: int) -> Any:
    out = torch.zeros(size * 3)
    work = dist.all_gather_single(out, sample(rank, 3), async_op=True)
    assert work is not None
    return work.wait(), out


@case
def all_gather_coalesced(rank: int, size: int) -> Any:
    lists = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [sample(rank, 3), sample(rank + 1, 4).view(2, 2)])
    return lists


@case
def all_gather_coalesced_async(rank: int, size: int) -> Any:
    lists = [[torch.zeros(3), torch.zeros(5)] for _ in range(size)]
    future = dist.all_gather_coalesced(lists, [sample(rank, 3), sample(rank, 5)], async_op=True)
    future.wait()
    return lists


@case
def gather_to_everybody(rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        outs = [torch.zeros(3) for _ in range(size)] if rank == root else None
        dist.gather(sample(rank, 3), outs, group_dst=root)
        results.append(outs)
    return results


@case
def gather_strided(rank: int, size: int) -> Any:
    bases = [torch.zeros(3, 4) for _ in range(size)]
    outs = [base.t() for base in bases] if rank == 0 else None
    dist.gather(sample(rank, 12).view(3, 4).t(), outs)
    return bases


@case
def gather_async(rank: int, size: int) -> Any:
    outs = [torch.zeros(3) for _ in range(size)] if rank == 1 else None
    work = dist.gather(sample(rank, 3), outs, dst=1, async_op=True)
    assert work is not None
    return work.wait(), outs


@case
def scatter_from_everybody(rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        out = torch.zeros(3)
        rows = [sample(root + place, 3) for place in range(size)] if rank == root else None
        dist.scatter(out, rows, group_src=root)
        results.append(out)
    return results


@case
def scatter_strided(rank: int, size: int) -> Any:
    base = torch.zeros(3, 4)
    rows = [sample(place, 12).view(3, 4).t() for place in range(size)] if rank == 0 else None
    dist.scatter(base.t(), rows)
    return base


@case
def scatter_async(rank: int, size: int) -> Any:
    out = torch.zeros(3)
    rows = [sample(place, 3) for place in range(size)] if rank == 0 else None
    work = dist.scatter(out, rows, async_op=True)
    assert work is not None
    return work.wait(), out
