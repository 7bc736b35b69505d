"""Every wrapper trains as on gloo, and goes on with the same bits when a rank is swapped."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from integration.comm.harness import FABRICS
from integration.comm.wrappers import compiled, data_parallel, pipeline, sharded, tensor_parallel
from integration.comm.wrappers.data_parallel import LowRankBuckets
from integration.comm.wrappers.swaps import (
    STEPS,
    SWAP_AT,
    Found,
    Swap,
    left_by,
    on_gloo,
    swapped,
    undisturbed,
)
from integration.comm.wrappers.training import Phase, Training

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


class Case(NamedTuple):
    """Which rank of a training leaves as planned, and which one dies."""

    training: type[Training]
    leaves: int
    dies: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.training.__name__}-{self.leaves}-{self.dies}-{self.phase.value}"

    def turned(self) -> Case:
        """Return the case in which the two ranks are exchanged, and one dies elsewhere."""
        compiles = issubclass(self.training, compiled.Compiled)
        other = BACKWARD if compiles or self.phase is FORWARD else FORWARD
        return Case(self.training, self.dies, self.leaves, other)


CASES = [
    Case(data_parallel.Buckets, 0, 1, BACKWARD),
    Case(data_parallel.Accumulation, 1, 2, FORWARD),
    Case(data_parallel.StaticGraph, 2, 0, BACKWARD),
    Case(data_parallel.UnusedParameters, 1, 2, BACKWARD),
    Case(data_parallel.HalfPrecision, 1, 2, BACKWARD),
    Case(data_parallel.LowRank, 2, 1, BACKWARD),
    Case(LowRankBuckets, 0, 2, FORWARD),
    Case(data_parallel.BatchNorm, 1, 0, FORWARD),
    Case(data_parallel.ZeroRedundancy, 0, 2, BACKWARD),
    Case(sharded.Sharded, 1, 2, FORWARD),
    Case(sharded.MixedPrecision, 2, 0, BACKWARD),
    Case(sharded.Hybrid, 0, 5, BACKWARD),
    Case(tensor_parallel.TensorParallel, 3, 1, FORWARD),
    Case(tensor_parallel.TensorAndData, 6, 0, BACKWARD),
    Case(pipeline.GPipe, 0, 1, FORWARD),
    Case(pipeline.OneForwardOneBackward, 2, 3, BACKWARD),
    Case(pipeline.Interleaved, 1, 0, BACKWARD),
    Case(pipeline.PipelineAndData, 3, 7, FORWARD),
    Case(compiled.CompiledBuckets, 1, 0, BACKWARD),
    Case(compiled.CompiledShards, 0, 1, BACKWARD),
]

INDUCTOR = Case(compiled.InductorBuckets, 1, 0, BACKWARD)
MORE = [INDUCTOR, *(case.turned() for case in CASES)]
"""What each training goes through besides, in `make test-full`."""
GLOO_CANNOT = (LowRankBuckets,)
"""What hangs on torch's own gloo already, and so on fabrics with gloo inside."""
pytestmark = pytest.mark.timeout(300)


def over(
    cases: Sequence[Case], more: Sequence[Case] = (), *, on_gloo_too: bool = False
) -> pytest.MarkDecorator:
    """Run a test for each of these on links, and now and then for more, and on other fabrics."""
    params = [
        pytest.param(
            case,
            fabric,
            id=f"{case}-{fabric}",
            marks=pytest.mark.full if fabric != "links" or case in more else (),
        )
        for case in (*cases, *more)
        for fabric in FABRICS
        if case.training not in GLOO_CANNOT or (fabric == "links" and not on_gloo_too)
    ]
    return pytest.mark.parametrize(("case", "fabric"), params)


@over(CASES, [INDUCTOR], on_gloo_too=True)
def test_training_is_as_on_gloo(case: Case, fabric: str) -> None:
    """Sums are made in another order, so the last bits may differ."""
    plain, found = on_gloo(case.training), undisturbed(case.training, fabric)

    far = case.training.tolerance
    for rank, there in plain.items():
        here = found[rank]
        assert list(here.losses) == list(there.losses) == list(range(STEPS))
        assert here.losses == pytest.approx(there.losses, rel=far)
        for ours, theirs in zip(_tensors(here.dumped), _tensors(there.dumped), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=far, atol=far)


@over(CASES, MORE)
def test_a_planned_swap_keeps_the_bits(case: Case, fabric: str) -> None:
    swap = Swap(case.leaves)

    found = swapped(case.training, fabric, swap)

    assert_same(found, undisturbed(case.training, fabric), swap)
    assert_delta(found, undisturbed(case.training, fabric), swap)
    assert [rank.broken for rank in found.values()] == [[]] * case.training.size


@over(CASES, MORE)
def test_a_death_inside_a_step_keeps_the_bits(case: Case, fabric: str) -> None:
    swap = Swap(case.dies, case.phase)

    found = swapped(case.training, fabric, swap)

    assert_same(found, undisturbed(case.training, fabric), swap)
    assert_delta(found, undisturbed(case.training, fabric), swap)
    accused = [(1, left_by(swap))]
    assert all(rank.broken in ([], accused) for rank in found.values())


def assert_same(found: dict[int, Found], expected: dict[int, Found], swap: Swap) -> None:
    """The joiner does what the rank it holds would have done, from when it holds it."""
    for rank, there in expected.items():
        here = found[rank]
        since = SWAP_AT if rank == swap.rank else 0
        assert here.losses == {step: there.losses[step] for step in range(since, STEPS)}
        assert here.digest == there.digest, f"rank {rank} holds other bits"


def assert_delta(found: dict[int, Found], expected: dict[int, Found], swap: Swap) -> None:
    """Stayers open links to the joiner only, and only those that they had to the leaver."""
    for rank, here in found.items():
        assert here.lanes == expected[rank].lanes
        if rank != swap.rank:
            assert here.change is not None
            assert here.change.kept
            assert here.change.after == here.change.before
            assert here.change.opened == len(here.change.after)


def _tensors(dumped: bytes) -> list[Any]:
    tensors, _records = torch.load(io.BytesIO(dumped))
    return list(tensors)
