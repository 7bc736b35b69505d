"""Every collective, over real processes, against what its definition says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import in_world
from tmover.comm.collectives import DIRECT_BYTES, FLAT_BYTES
from tmover.errors import ProtocolError

SIZES = (0, 1, 7, 1000, FLAT_BYTES // 4 + 1, DIRECT_BYTES // 4 + 5, 3 * DIRECT_BYTES // 4 + 2)
DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def sample(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small whole numbers, so that sums are exact in every type and order."""
    values = (torch.arange(count) * 3 + rank) % 4
    return values.to(dtype)


def summed(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, tensors)


def expected(op: Any, size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    ranks = [sample(rank, count, dtype) for rank in range(size)]
    folds: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    return functools.reduce(folds[op], ranks)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_is_right_for_every_operation_type_and_size(size: int) -> None:
    def program(rank: int, size: int) -> None:
        bitwise = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
        plain = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        for dtype in DTYPES:
            for op in plain if dtype.is_floating_point else plain + bitwise:
                for count in SIZES if dtype is torch.float32 else (7, 20_000):
                    tensor = sample(rank, count, dtype)
                    dist.all_reduce(tensor, op)
                    wanted = expected(op, size, count, dtype)
                    assert torch.equal(tensor, wanted), (dtype, op, count)

    in_world(program, size)


def test_averages_are_of_the_sum() -> None:
    def program(rank: int, size: int) -> None:
        for count in (3, SIZES[-1]):
            tensor = torch.full((count,), float(rank))
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            assert torch.equal(tensor, torch.full((count,), 1.0))
        whole = torch.full((3,), rank + 1)
        dist.all_reduce(whole, dist.ReduceOp.AVG)
        assert whole.tolist() == [2, 2, 2]

    in_world(program, 3)


def test_tensors_of_any_shape_and_layout_are_reduced_in_place() -> None:
    def program(rank: int, _size: int) -> None:
        scalar = torch.tensor(float(rank))
        columns = torch.arange(12.0).view(3, 4).t()
        strided = torch.zeros(10)[::2]
        strided += rank
        last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        for tensor in (scalar, columns, strided, last):
            dist.all_reduce(tensor)
        assert scalar == 1
        assert torch.equal(columns, 2 * torch.arange(12.0).view(3, 4).t())
        assert torch.equal(strided, torch.ones(5))
        assert torch.equal(last, torch.full((2, 3, 4, 5), 2.0))
        complex_ = torch.tensor([1 + 2j, 3j])
        dist.all_reduce(complex_)
        assert torch.equal(complex_, torch.tensor([2 + 4j, 6j]))
        flags = torch.tensor([True, rank == 0, False])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        assert flags.tolist() == [True, True, False]

    in_world(program, 2)


def test_the_bits_do_not_depend_on_who_is_early() -> None:
    def program(rank: int, size: int) -> list[bytes]:
        """Reduce numbers that round differently in every order; the ranks start one by one."""
        bits = []
        for count in (1000, SIZES[-2], SIZES[-1]):
            seen = set()
            for turn in range(size):
                generator = torch.Generator().manual_seed(rank)
                tensor = torch.randn(count, generator=generator)
                for _ in range((rank + turn) % size):
                    torch.randn(100_000).sort()  # be late
                dist.all_reduce(tensor)
                seen.add(tensor.numpy().tobytes())
            assert len(seen) == 1
            bits.append(seen.pop())
        return bits

    found = in_world(program, 3)

    assert found["n0"] == found["n1"] == found["n2"]


def test_everything_else_that_moves_tensors_is_right() -> None:
    def program(rank: int, size: int) -> None:
        for count in (0, 5, SIZES[-1]):
            _check_gathering(rank, size, count)
            _check_scattering(rank, size, count)
            _check_rooted(rank, size, count)
            _check_exchanging(rank, size, count)

    in_world(program, 3)


def _check_gathering(rank: int, size: int, count: int) -> None:
    mine = sample(rank, count)
    everybody = [sample(other, count) for other in range(size)]
    parts = [torch.empty(count) for _ in range(size)]
    dist.all_gather(parts, mine)
    assert all(torch.equal(a, b) for a, b in zip(parts, everybody, strict=True))
    whole = torch.empty(size * count)
    dist.all_gather_into_tensor(whole, mine)
    assert torch.equal(whole, torch.cat(everybody))
    stacked = torch.empty(size, count)
    dist.all_gather_single(stacked, mine)
    assert torch.equal(stacked, torch.stack(everybody))


def _check_scattering(rank: int, size: int, count: int) -> None:
    parts = [sample(rank + place, count) for place in range(size)]
    wanted = summed(sample(other + rank, count) for other in range(size))
    out = torch.empty(count)
    dist.reduce_scatter(out, parts)
    assert torch.equal(out, wanted)
    dist.reduce_scatter_tensor(out.zero_(), torch.cat(parts), op=dist.ReduceOp.SUM)
    assert torch.equal(out, wanted)
    dist.reduce_scatter_single(out.zero_(), torch.cat(parts), op=dist.ReduceOp.AVG)
    assert torch.allclose(out, wanted / size)


def _check_rooted(rank: int, size: int, count: int) -> None:
    for root in range(size):
        tensor = sample(rank, count)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, sample(root, count))
        outs = [torch.empty(count) for _ in range(size)] if rank == root else None
        dist.gather(sample(rank, count), outs, dst=root)
        for other, out in enumerate(outs or []):
            assert torch.equal(out, sample(other, count))
        parts = [sample(place, count) for place in range(size)] if rank == root else None
        out = torch.empty(count)
        dist.scatter(out, parts, src=root)
        assert torch.equal(out, sample(rank, count))
        tensor = sample(rank, count)
        dist.reduce(tensor, root)
        if rank == root:
            assert torch.equal(tensor, summed(sample(other, count) for other in range(size)))


def _check_exchanging(rank: int, size: int, count: int) -> None:
    outs = [torch.empty(count) for _ in range(size)]
    dist.all_to_all(outs, [sample(rank * size + place, count) for place in range(size)])
    for other, out in enumerate(outs):
        assert torch.equal(out, sample(other * size + rank, count))
    whole = torch.empty(size * count)
    dist.all_to_all_single(whole, torch.cat([sample(rank, count)] * size))
    assert torch.equal(whole, torch.cat([sample(other, count) for other in range(size)]))
    given = [place + 1 for place in range(size)]
    uneven = torch.empty((rank + 1) * size, 2)
    dist.all_to_all_single(
        uneven, torch.full((sum(given), 2), float(rank)), [rank + 1] * size, given
    )
    assert uneven[:, 0].tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]


def test_objects_reach_everybody() -> None:
    def program(rank: int, size: int) -> None:
        objects: list[Any] = [{"rank": 0}, "x" * 1000] if rank == 0 else [None, None]
        dist.broadcast_object_list(objects, src=0)
        assert objects == [{"rank": 0}, "x" * 1000]
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, ("from", rank))
        assert gathered == [("from", other) for other in range(size)]
        on_root: list[Any] | None = [None] * size if rank == 1 else None
        dist.gather_object(rank * 10, on_root, dst=1)
        assert on_root in (None, [0, 10, 20])
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 2 else None, 2)
        assert mine == [f"for {rank}"]
        if rank == 0:
            dist.send_object_list(["sent"], dst=1)
        if rank == 1:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=0)
            assert received == ["sent"]

    in_world(program, 3)


def test_asynchronous_collectives_run_in_the_order_they_were_started_in() -> None:
    def program(_rank: int, size: int) -> None:
        tensors = [torch.full((count,), 1.0) for count in (10, SIZES[-1], 3, 50_000)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        last = torch.ones(4)
        dist.all_reduce(last)  # waits for its turn
        assert all(work is not None and work.is_completed() for work in works)
        for work, tensor in zip(works, tensors, strict=True):
            assert work is not None
            assert work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, size))
        chained = dist.all_reduce(torch.ones(2), async_op=True)
        assert chained is not None
        doubled = chained.get_future().then(lambda done: done.value()[0] * 2)
        assert doubled.wait().tolist() == [2.0 * size] * 2

    in_world(program, 3)


def test_a_collective_may_be_started_by_the_outcome_of_another() -> None:
    def program(_rank: int, size: int) -> None:
        def again(done: torch.futures.Future[Any]) -> torch.Tensor:
            tensor: torch.Tensor = done.value()[0]
            dist.all_reduce(tensor)
            return tensor

        first = dist.all_reduce(torch.ones(2), async_op=True)
        assert first is not None
        result = first.get_future().then(again).wait()
        assert result.tolist() == [float(size * size)] * 2

    in_world(program, 2)


def test_what_an_outcome_starts_comes_before_what_was_started_later() -> None:
    """Whether the outcome was there or not when somebody asked: communication hooks rely on it."""

    def program(rank: int, size: int) -> None:
        def again(done: torch.futures.Future[Any]) -> torch.Tensor:
            tensor: torch.Tensor = done.value()[0]
            for _ in range(2):
                work = dist.all_reduce(tensor, async_op=True)
                assert work is not None
                work.get_future().wait()
            return tensor

        if rank == 0:
            dist.recv(torch.ones(1), 1)  # the others cannot be done before this one begins
        first = dist.all_reduce(torch.ones(2), async_op=True)
        assert first is not None
        if rank == 0:
            first.wait()
        result = first.get_future().then(again)
        last = dist.all_reduce(torch.ones(3), async_op=True)
        assert last is not None
        if rank == 1:
            dist.send(torch.ones(1), 0)
        last.wait()
        assert result.wait().tolist() == [float(size**3)] * 2

    in_world(program, 2)


def test_groups_of_some_ranks_work_beside_each_other() -> None:
    def program(rank: int, _size: int) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 1]), dist.new_group([0, 2])]
        for members, pair in zip(((0, 1), (1, 2), (0, 2)), pairs, strict=True):
            tensor = torch.tensor([float(rank)])
            if rank in members:
                dist.all_reduce(tensor, group=pair)
                assert tensor.item() == sum(members)
                assert dist.get_rank(pair) == members.index(rank)
                assert dist.get_process_group_ranks(pair) == list(members)
            else:
                assert dist.get_rank(pair) == -1
        dist.barrier()
        everybody = dist.new_group()
        dist.barrier(everybody)
        if rank != 1:
            dist.destroy_process_group(pairs[2])
        dist.monitored_barrier(timeout=timedelta(seconds=5))
        dist.all_reduce(tensor)

    in_world(program, 3)


def test_coalesced_collectives_are_each_right() -> None:
    def program(rank: int, size: int) -> None:
        tensors = [sample(rank, 5), sample(rank, 9)]
        with dist.distributed_c10d._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert torch.equal(tensors[1], summed(sample(other, 9) for other in range(size)))
        outs = [torch.empty(10), torch.empty(18)]
        with dist.distributed_c10d._coalescing_manager():
            for out, count in zip(outs, (5, 9), strict=True):
                dist.all_gather_into_tensor(out, sample(rank, count))
        assert torch.equal(outs[1], torch.cat([sample(other, 9) for other in range(size)]))

    in_world(program, 2)


def test_functional_collectives_find_the_group_by_its_name() -> None:
    from torch.distributed import _functional_collectives as functional

    def program(rank: int, size: int) -> None:
        world = dist.group.WORLD
        assert world is not None
        reduced = functional.all_reduce(sample(rank, 4), "sum", world)
        assert torch.equal(reduced, summed(sample(other, 4) for other in range(size)))
        gathered = functional.all_gather_single(sample(rank, 4), 0, world)
        assert torch.equal(gathered, torch.cat([sample(other, 4) for other in range(size)]))

    in_world(program, 2)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.all_reduce(torch.ones(5)),
            "12 bytes",
        ),
        (lambda: dist.all_reduce(torch.ones(3)), lambda: dist.barrier(), "barrier"),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64)),
            "another type",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX),
            "another type, reduction",
        ),
        (
            lambda: dist.all_reduce(torch.ones(600_000)),
            lambda: dist.all_reduce(torch.ones(700_000)),
            "of 2400000 bytes",
        ),
    ],
)
def test_ranks_that_do_different_things_are_told(
    first: Callable[[], Any], second: Callable[[], Any], words: str
) -> None:
    def program(rank: int, _size: int) -> str:
        with pytest.raises(ProtocolError) as caught:
            (first if rank == 0 else second)()
        return str(caught.value)

    found = in_world(program, 2)

    assert any(words in text for text in found.values()), found
    assert all("ranks do different things" in text for text in found.values())


def test_what_is_reduced_in_inference_mode_goes_well_there_and_leaves_training_alone() -> None:
    """The group's thread has a mode of its own, and scratch memory outlives an evaluation."""

    def program(rank: int, size: int) -> None:
        total = sum(range(1, size + 1))
        for count in (3, 20_003, 400_003):
            with torch.inference_mode():
                for waits in (True, False):
                    metric = torch.full((count,), rank + 1.0)
                    work = dist.all_reduce(metric, async_op=not waits)
                    if work is not None:
                        work.wait()
                    assert metric[0] == metric[-1] == total
                rows = [torch.empty(count) for _ in range(size)]
                work = dist.all_gather(rows, torch.full((count,), float(rank)), async_op=True)
                assert work is not None
                work.wait()
                assert [row[-1].item() for row in rows] == list(range(size))
            for again in (count, 2 * count % 1000):
                gradient = torch.full((again,), rank + 1.0)
                dist.all_reduce(gradient)
                assert (gradient == total).all()

    in_world(program, 3)
