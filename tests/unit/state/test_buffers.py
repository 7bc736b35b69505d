from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tmover.errors import StateError
from tmover.state.buffers import Buffers


class Holder(nn.Module):
    inner: Any

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.inner = nn.Module()
        self.inner.register_buffer("constant", torch.arange(4.0))
        self.inner.register_buffer("cache", torch.zeros(2), persistent=False)
        self.inner.register_buffer("later", None)
        self.inner.register_buffer("wide", torch.ones(1).expand(3))


def values(module: nn.Module) -> dict[str, list[float]]:
    return {k: b.flatten().tolist() for k, b in module.named_buffers()}


def watched(module: nn.Module) -> Buffers:
    buffers = Buffers()
    buffers.add("m", module)
    return buffers


def varying(buffers: Buffers) -> list[str]:
    return [key for inner in buffers.varying().values() for key in inner]


NORM = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(3),
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 64)),
    ],
    ids=["batch norm", "instance norm", "spectral norm"],
)
def test_statistics_that_a_forward_updates_vary(make: Callable[[], nn.Module]) -> None:
    module = make()
    buffers = watched(module)
    before = values(module)

    module(
        torch.randn(4, 3, 5).transpose(1, 2) if "Linear" in str(module) else torch.randn(4, 3, 5)
    )

    changed = {k for k, v in values(module).items() if v != before[k]}
    assert changed
    assert changed == set(varying(buffers))


def test_what_never_changed_does_not_vary() -> None:
    module = Holder()
    buffers = watched(module)

    assert varying(buffers) == []
    module.norm(torch.randn(4, 3))
    assert varying(buffers) == NORM
    buffers.refresh()
    assert varying(buffers) == NORM


def test_what_is_written_with_the_value_it_has_does_not_vary() -> None:
    module = Holder()
    buffers = watched(module)

    for _ in range(3):
        module.inner.constant.copy_(torch.arange(4.0))  # as DDP's broadcast does every step
        assert varying(buffers) == []
        buffers.refresh()


def test_restoring_brings_back_the_values_of_the_last_refresh() -> None:
    module = Holder()
    buffers = watched(module)
    module.norm(torch.randn(4, 3))
    buffers.refresh()
    before = values(module)
    identities = {k: id(b) for k, b in module.named_buffers()}

    for _ in range(2):
        module.norm(torch.randn(4, 3))
        module.inner.constant.mul_(2)
        module.inner.cache = torch.ones(7)
        module.inner.later = torch.ones(1)
        module.inner.wide = torch.zeros(3)
        assert values(module) != before
        buffers.restore()

        assert values(module) == before
        assert {k: id(b) for k, b in module.named_buffers()} == identities


class Codebook(nn.Module):
    """Moves by an average of its own, through `.data`, as quantizers do."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.ones(2))
        self.register_buffer("mask", torch.ones(2))

    def forward(self) -> None:
        self.codes.data.mul_(0.5).add_(1)


def test_what_is_written_through_data_goes_back_and_varies() -> None:
    module = Codebook()
    buffers = watched(module)
    for _ in range(12):
        buffers.refresh()
        before = values(module)
        for _ in range(2):
            module()
            assert varying(buffers) == ["codes"]
            buffers.restore()
            assert values(module) == before
        module()


def test_what_begins_to_be_written_through_data_is_found_at_a_power_of_two() -> None:
    module = Codebook()
    buffers = watched(module)
    for _ in range(7):
        buffers.refresh()
    module()
    with pytest.raises(
        StateError, match=r"`codes` was written through `\.data` for the first time"
    ):
        buffers.restore()

    buffers.refresh()
    before = values(module)
    module()
    buffers.restore()

    assert values(module) == before


def test_what_is_not_a_number_and_stays_so_has_not_changed() -> None:
    module = Codebook()
    module.codes.fill_(float("nan"))
    buffers = watched(module)
    for _ in range(7):
        buffers.refresh()

    buffers.restore()

    assert varying(buffers) == []


def test_a_buffer_replaced_by_another_tensor_varies_and_is_kept() -> None:
    module = Holder()
    buffers = watched(module)

    module.inner.cache = torch.ones(3)
    assert varying(buffers) == ["inner.cache"]
    buffers.refresh()
    module.inner.cache = torch.ones(5)
    buffers.restore()

    assert module.inner.cache.tolist() == [1.0] * 3


def test_a_buffer_set_for_the_first_time_varies() -> None:
    module = Holder()
    buffers = watched(module)

    module.inner.later = torch.ones(1)

    assert varying(buffers) == ["inner.later"]


def test_a_buffer_registered_later_is_found() -> None:
    module = Holder()
    buffers = watched(module)
    module.inner.register_buffer("new", torch.zeros(2))
    buffers.refresh()

    module.inner.new.add_(1)

    assert varying(buffers) == ["inner.new"]
    buffers.restore()
    assert module.inner.new.tolist() == [0.0, 0.0]


def test_a_tied_buffer_is_named_once() -> None:
    module = Holder()
    module.inner.register_buffer("same", module.inner.constant)
    buffers = watched(module)

    module.inner.constant.add_(1)

    assert varying(buffers) == ["inner.constant"]


def test_after_a_rebase_nothing_varies() -> None:
    module = Holder()
    buffers = watched(module)
    module.norm(torch.randn(4, 3))
    assert varying(buffers)

    buffers.rebase()

    assert varying(buffers) == []
    module.norm(torch.randn(4, 3))
    assert varying(buffers) == NORM


def test_applied_values_vary_and_are_what_is_gone_back_to() -> None:
    module = Holder()
    buffers = watched(module)

    buffers.apply({"m": {"inner.constant": torch.ones(4), "inner.wide": torch.zeros(3)}})

    assert varying(buffers) == ["inner.constant", "inner.wide"]
    assert module.inner.wide.stride() == (0,)
    module.inner.constant.mul_(9)
    buffers.restore()
    assert module.inner.constant.tolist() == [1.0] * 4
    assert module.inner.wide.tolist() == [0.0] * 3


def test_a_value_of_another_shape_replaces_the_buffer() -> None:
    module = Holder()

    watched(module).apply({"m": {"inner.cache": torch.ones(9), "inner.later": torch.ones(1)}})

    assert module.inner.cache.tolist() == [1.0] * 9
    assert module.inner.later.tolist() == [1.0]


def test_a_value_for_no_buffer_is_refused() -> None:
    with pytest.raises(StateError, match=r"tracked `m` has no buffer `nothing` here"):
        watched(Holder()).apply({"m": {"nothing": torch.ones(1)}})


def test_buffers_that_are_not_replicated_are_restored_and_not_named() -> None:
    module = Holder()
    buffers = Buffers()
    buffers.add("m", module, replicated=False)
    module.inner.constant.add_(1)

    assert varying(buffers) == []
    buffers.refresh()
    module.inner.constant.add_(1)
    buffers.restore()
    assert module.inner.constant.tolist() == [1.0, 2.0, 3.0, 4.0]
