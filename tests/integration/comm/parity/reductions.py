"""Cases: what reduces tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from integration.comm.parity.case import SIZES, add, case, sample

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.complex64, torch.complex128,
)  # fmt: skip
EVERYWHERE = (
    torch.uint8, torch.int64, torch.bool, torch.int16, torch.bfloat16, torch.float32,
    torch.complex64,
)  # fmt: skip
"""Types that are tried in worlds of every size; the others in small ones."""
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
LENGTHS = (0, 1, 9_000, 50_000, 300_001)


def sizes_for(dtype: torch.dtype) -> tuple[int, ...]:
    return SIZES if dtype in EVERYWHERE else SIZES[:2]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _all_reduce(rank: int, _size: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    tensor = sample(rank, 7, dtype)
    dist.all_reduce(tensor, op)
    return tensor


def _reduce(rank: int, size: int, dtype: torch.dtype, op: Any) -> Any:
    tensor = sample(rank, 7, dtype)
    dist.reduce(tensor, size - 1, op)
    return tensor if rank == size - 1 else None


def _reduce_scatter(rank: int, size: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    out = torch.zeros(3, dtype=dtype)
    dist.reduce_scatter_tensor(out, sample(rank, 3 * size, dtype), op)
    return out


def _reduce_scatter_list(rank: int, size: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    out = torch.zeros(3, dtype=dtype)
    dist.reduce_scatter(out, [sample(rank + place, 3, dtype) for place in range(size)], op)
    return out


def _all_reduce_long(rank: int, _size: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    tensor = sample(rank, count, dtype)
    dist.all_reduce(tensor)
    return tensor


def _reduce_scatter_long(rank: int, size: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    out = torch.zeros(count, dtype=dtype)
    dist.reduce_scatter_tensor(out, sample(rank, count * size, dtype))
    return out


for _dtype in DTYPES:
    for _name, _op in OPS.items():
        for _body in (_all_reduce, _reduce, _reduce_scatter, _reduce_scatter_list):
            add(
                f"{_body.__name__[1:]}-{_name}-{short(_dtype)}",
                functools.partial(_body, dtype=_dtype, op=_op),
                family=f"{_body.__name__[1:]}-{_name}",
                sizes=sizes_for(_dtype),
            )
for _dtype in (torch.bfloat16, torch.float32):
    for _count in LENGTHS:
        for _long in (_all_reduce_long, _reduce_scatter_long):
            add(
                f"{_long.__name__[1:]}-{_count}-{short(_dtype)}",
                functools.partial(_long, dtype=_dtype, count=_count),
                family=_long.__name__[1:],
            )


@case
def all_reduce_premul_sum(rank: int, _size: int) -> Any:
    tensor = sample(rank, 4)
    dist.all_reduce(tensor, _make_nccl_premul_sum(2.0))
    return tensor


@case
def all_reduce_0_dim(rank: int, _size: int) -> Any:
    tensor = torch.tensor(float(rank + 1))
    dist.all_reduce(tensor)
    return tensor


@case
def all_reduce_transposed(rank: int, _size: int) -> Any:
    base = sample(rank, 12).view(3, 4)
    dist.all_reduce(base.t())
    return base


@case
def all_reduce_strided(rank: int, _size: int) -> Any:
    base = sample(rank, 12)
    dist.all_reduce(base[::2])
    return base


@case
def all_reduce_part_of_a_tensor(rank: int, _size: int) -> Any:
    base = sample(rank, 24).view(4, 6)
    dist.all_reduce(base[1:3, 2:5])
    return base


@case
def all_reduce_channels_last(rank: int, _size: int) -> Any:
    tensor = sample(rank, 48).view(2, 2, 3, 4).to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    return tensor


@case
def all_reduce_requiring_grad(rank: int, _size: int) -> Any:
    tensor = sample(rank, 4).requires_grad_()
    dist.all_reduce(tensor)
    return tensor


@case
def all_reduce_of_a_conjugate(rank: int, _size: int) -> Any:
    tensor = sample(rank, 4, torch.complex64).conj()
    dist.all_reduce(tensor)
    return tensor


def _all_reduce_sparse(rank: int, _size: int) -> Any:
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[rank, 7]]), torch.tensor([1.0, 2.0 * rank]), (9,)
    )
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    (result,) = work.get_future().wait()
    return tensor.to_dense(), result.to_dense(), result.layout is torch.sparse_coo


@case
def all_reduce_sparse(rank: int, size: int) -> Any:
    return _all_reduce_sparse(rank, size)


@case
def all_reduce_sparse_rows(rank: int, _size: int) -> Any:
    values = sample(rank, 6).view(2, 3)
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, rank % 2]]), values, (2, 3))
    dist.all_reduce(tensor)
    return tensor.to_dense()


@case
def all_reduce_sparse_max(_rank: int, _size: int) -> Any:
    dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX)


@case
def all_reduce_async(rank: int, _size: int) -> Any:
    tensors = [sample(rank, count) for count in (3, 60_000, 5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    waited = [work.wait() for work in works if work is not None]
    done = [work.is_completed() for work in works if work is not None]
    return tensors, waited, done


@case
def all_reduce_future(rank: int, _size: int) -> Any:
    work = dist.all_reduce(sample(rank, 3), async_op=True)
    assert work is not None
    value = work.get_future().wait()
    doubled = work.get_future().then(lambda done: [item * 2 for item in done.value()]).wait()
    return value, doubled, work.is_success()


@case
def all_reduce_result(rank: int, _size: int) -> Any:
    work = dist.all_reduce(sample(rank, 3), async_op=True)
    assert work is not None
    work.wait()
    return work.result()


@case
def all_reduce_coalesced(rank: int, _size: int) -> Any:
    tensors = [sample(rank, 3), sample(rank, 5).view(5, 1), sample(rank, 40_000), sample(rank, 0)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@case
def all_reduce_coalesced_max(rank: int, _size: int) -> Any:
    tensors = [sample(rank, 3), sample(rank, 5)]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)
    return tensors


@case
def all_reduce_coalesced_strided(rank: int, _size: int) -> Any:
    bases = [sample(rank, 8), sample(rank, 12).view(3, 4)]
    dist.all_reduce_coalesced([bases[0][::2], bases[1].t()])
    return bases


@case
def all_reduce_coalesced_complex(rank: int, _size: int) -> Any:
    tensors = [sample(rank, 3, torch.complex64), sample(rank, 2, torch.complex64)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@case
def all_reduce_coalesced_async(rank: int, _size: int) -> Any:
    tensors = [sample(rank, 3), sample(rank, 5)]
    future = dist.all_reduce_coalesced(tensors, async_op=True)
    assert future is not None
    return future.wait(), tensors


@case
def reduce_leaves_the_others_alone(rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        tensor = sample(rank, 4)
        dist.reduce(tensor, group_dst=root)
        results.append(tensor if rank == root else None)
    return results


@case
def reduce_strided(rank: int, _size: int) -> Any:
    base = sample(rank, 12).view(3, 4)
    dist.reduce(base.t(), 0)
    return base if rank == 0 else None


@case
def reduce_async(rank: int, _size: int) -> Any:
    tensor = sample(rank, 4)
    work = dist.reduce(tensor, 1, async_op=True)
    assert work is not None
    return work.wait(), tensor if rank == 1 else None


@case
def reduce_scatter_uneven(rank: int, size: int) -> Any:
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, [sample(rank, place + 1) for place in range(size)])
    return out


@case
def reduce_scatter_2_d(rank: int, size: int) -> Any:
    out = torch.zeros(2, 3)
    dist.reduce_scatter(out, [sample(rank + place, 6).view(2, 3) for place in range(size)])
    return out


@case
def reduce_scatter_strided(rank: int, size: int) -> Any:
    base = torch.zeros(8)
    dist.reduce_scatter(base[::2], [sample(rank + place, 8)[1::2] for place in range(size)])
    return base


@case
def reduce_scatter_leaves_its_inputs(rank: int, size: int) -> Any:
    rows = [sample(rank + place, 4) for place in range(size)]
    dist.reduce_scatter(torch.zeros(4), rows)
    return rows


@case
def reduce_scatter_tensor_shapes(rank: int, size: int) -> Any:
    flat, deep = torch.zeros(6), torch.zeros(2, 3)
    dist.reduce_scatter_tensor(flat, sample(rank, 6 * size).view(size, 6))
    dist.reduce_scatter_tensor(deep, sample(rank, 6 * size).view(2 * size, 3))
    return flat, deep


@case
def reduce_scatter_tensor_strided(rank: int, size: int) -> Any:
    base = torch.zeros(6)
    dist.reduce_scatter_tensor(base[::2], sample(rank, 6 * size)[::2])
    return base


@case
def reduce_scatter_tensor_async(rank: int, size: int) -> Any:
    out = torch.zeros(3)
    work = dist.reduce_scatter_tensor(out, sample(rank, 3 * size), async_op=True)
    assert work is not None
    return work.wait(), out


@case
def reduce_scatter_single(rank: int, size: int) -> Any:
    out = torch.zeros(3)
    dist.reduce_scatter_single(out, sample(rank, 3 * size))
    return out
