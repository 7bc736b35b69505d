"""Cases: all-to-all, barriers, and collectives that are coalesced."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from integration.comm.parity.case import add, case, sample
from integration.comm.parity.reductions import DTYPES, LENGTHS, short, sizes_for


def _all_to_all(rank: int, size: int, dtype: torch.dtype) -> Any:
    outs = [torch.zeros(3, dtype=dtype) for _ in range(size)]
    dist.all_to_all(outs, [sample(rank + place, 3, dtype) for place in range(size)])
    return outs


def _all_to_all_single(rank: int, size: int, dtype: torch.dtype) -> Any:
    out = torch.zeros(3 * size, dtype=dtype)
    dist.all_to_all_single(out, sample(rank, 3 * size, dtype))
    return out


def _all_to_all_single_long(rank: int, size: int, count: int) -> Any:
    out = torch.zeros(count * size)
    dist.all_to_all_single(out, sample(rank, count * size))
    return out


def _all_to_all_long(rank: int, size: int, count: int) -> Any:
    outs = [torch.zeros(count) for _ in range(size)]
    dist.all_to_all(outs, [sample(rank + place, count) for place in range(size)])
    return outs


for _body in (_all_to_all, _all_to_all_single):
    for _dtype in DTYPES:
        _family = _body.__name__[1:]
        _part = functools.partial(_body, dtype=_dtype)
        add(f"{_family}-{short(_dtype)}", _part, family=_family, sizes=sizes_for(_dtype))
for _long in (_all_to_all_long, _all_to_all_single_long):
    for _count in LENGTHS:
        _family = _long.__name__[1:]
        add(f"{_family}-{_count}", functools.partial(_long, count=_count), family=_family)


@case
def all_to_all_uneven(rank: int, size: int) -> Any:
    outs = [torch.zeros(rank + place + 1) for place in range(size)]
    dist.all_to_all(outs, [sample(rank, rank + place + 1) for place in range(size)])
    return outs


@case
def all_to_all_2_d(rank: int, size: int) -> Any:
    outs = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_to_all(outs, [sample(rank + place, 6).view(2, 3) for place in range(size)])
    return outs


@case
def all_to_all_strided(rank: int, size: int) -> Any:
    bases = [torch.zeros(3, 4) for _ in range(size)]
    dist.all_to_all(
        [base.t() for base in bases],
        [sample(rank + place, 12).view(3, 4).t() for place in range(size)],
    )
    return bases


@case
def all_to_all_some_empty(rank: int, size: int) -> Any:
    outs = [torch.zeros(rank % 2) for _ in range(size)]
    dist.all_to_all(outs, [sample(rank, place % 2) for place in range(size)])
    return outs


@case
def all_to_all_async(rank: int, size: int) -> Any:
    outs = [torch.zeros(2) for _ in range(size)]
    rows = [sample(rank + place, 2) for place in range(size)]
    work = dist.all_to_all(outs, rows, async_op=True)
    assert work is not None
    return work.wait(), outs


@case
def all_to_all_single_uneven(rank: int, size: int) -> Any:
    given = [place + 1 for place in range(size)]
    out = torch.zeros((rank + 1) * size)
    dist.all_to_all_single(out, sample(rank, sum(given)), [rank + 1] * size, given)
    return out


@case
def all_to_all_single_uneven_2_d(rank: int, size: int) -> Any:
    given = [place + 1 for place in range(size)]
    out = torch.zeros((rank + 1) * size, 3)
    rows = sample(rank, 3 * sum(given)).view(-1, 3)
    dist.all_to_all_single(out, rows, [rank + 1] * size, given)
    return out


@case
def all_to_all_single_even_2_d(rank: int, size: int) -> Any:
    out = torch.zeros(2 * size, 3)
    dist.all_to_all_single(out, sample(rank, 6 * size).view(-1, 3))
    return out


@case
def all_to_all_single_with_zeros(rank: int, size: int) -> Any:
    given = [place % 2 for place in range(size)]
    out = torch.zeros((rank % 2) * size)
    dist.all_to_all_single(out, sample(rank, sum(given)), [rank % 2] * size, given)
    return out


@case
def all_to_all_single_only_input_sizes(rank: int, size: int) -> Any:
    out = torch.zeros(2 * size)
    dist.all_to_all_single(out, sample(rank, 2 * size), None, [2] * size)
    return out


@case
def all_to_all_single_only_output_sizes(rank: int, size: int) -> Any:
    out = torch.zeros(2 * size)
    dist.all_to_all_single(out, sample(rank, 2 * size), [2] * size)
    return out


@case
def all_to_all_single_strided(rank: int, size: int) -> Any:
    base = torch.zeros(3, 2 * size)
    dist.all_to_all_single(base.t(), sample(rank, 6 * size).view(2 * size, 3))
    return base


@case
def all_to_all_single_input_strided(rank: int, size: int) -> Any:
    out = torch.zeros(2 * size, 3)
    dist.all_to_all_single(out, sample(rank, 6 * size).view(3, 2 * size).t())
    return out


@case
def all_to_all_single_async(rank: int, size: int) -> Any:
    out = torch.zeros(2 * size)
    work = dist.all_to_all_single(out, sample(rank, 2 * size), async_op=True)
    assert work is not None
    return work.wait(), out


@case
def barrier(_rank: int, _size: int) -> Any:
    dist.barrier()
    dist.barrier(timeout=timedelta(seconds=20))
    work = dist.barrier(async_op=True)
    assert work is not None
    return work.wait(), work.is_completed()


@case
def barrier_with_device_ids(_rank: int, _size: int) -> Any:
    dist.barrier(device_ids=[0])


@case
def monitored_barrier(_rank: int, _size: int) -> Any:
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    dist.monitored_barrier(timeout=20.0)


@case
def works_wait_with_a_timeout(rank: int, _size: int) -> Any:
    work = dist.all_reduce(sample(rank, 4), async_op=True)
    assert work is not None
    return work.wait(timedelta(seconds=20))


@case
def coalesced_all_reduces(rank: int, _size: int) -> Any:
    tensors = [sample(rank, 3), sample(rank, 50_000), sample(rank, 2).view(1, 2)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


@case
def coalesced_all_reduces_async(rank: int, _size: int) -> Any:
    tensors = [sample(rank, 3), sample(rank, 5)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    manager.wait()
    return tensors


@case
def coalesced_all_gathers(rank: int, size: int) -> Any:
    outs = [torch.zeros(3 * size), torch.zeros(5 * size)]
    with _coalescing_manager():
        for out in outs:
            dist.all_gather_into_tensor(out, sample(rank, out.numel() // size))
    return outs


@case
def coalesced_all_gathers_async(rank: int, size: int) -> Any:
    outs = [torch.zeros(3 * size), torch.zeros(5 * size)]
    with _coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_into_tensor(out, sample(rank, out.numel() // size))
    manager.wait()
    return outs


@case
def coalesced_reduce_scatters(rank: int, size: int) -> Any:
    outs = [torch.zeros(3), torch.zeros(5)]
    with _coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, sample(rank, out.numel() * size))
    return outs


@case
def coalesced_mixed(rank: int, size: int) -> Any:
    with _coalescing_manager():
        dist.all_reduce(sample(rank, 3))
        dist.all_gather_into_tensor(torch.zeros(3 * size), sample(rank, 3))


@case
def coalesced_nothing(_rank: int, _size: int) -> Any:
    with _coalescing_manager():
        pass
