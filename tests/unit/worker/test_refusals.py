"""What is refused, or warned of, because a lost node could not be made good for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tmover.errors import ConfigError, StateError
from tmover.state.capture import Tracked
from tmover.state.records import Record
from tmover.state.snapshot import Snapshot
from tmover.worker import refusals


class Counting(torch.optim.SGD):
    """Counts its updates where nobody sees it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = 0

    def step(self, closure: Any = None) -> Any:
        self.slow += 1
        return super().step(closure)


class Rank:
    """A model with BatchNorm and an average of it, as one rank has them."""

    def __init__(self, shift: float, *, use_buffers: bool) -> None:
        self.model = nn.BatchNorm1d(2)
        self.average = AveragedModel(self.model, use_buffers=use_buffers)
        self.shift = shift
        self.tracked = Tracked()
        self.tracked.track("model", self.model)
        self.tracked.track("average", self.average)

    def step(self) -> bytes:
        """Do a step; return the record of its vote."""
        self.tracked.buffers.refresh()
        self.model(torch.arange(4.0).view(2, 2) + self.shift)
        record = Record.capture(self.tracked, position=None).encode()
        self.average.update_parameters(self.model)
        return record


def tracked(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tracked:
    found = Tracked()
    found.track("model", model)
    found.track("optimizer", optimizer)
    return found


def check(updates: refusals.Updates, optimizer: torch.optim.Optimizer) -> None:
    updates.check(optimizer, (optimizer,), {}, undo=False)


def test_a_group_that_is_added_after_the_first_update_is_refused() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    updates = refusals.Updates(tracked(nn.Sequential(first, second), optimizer))
    check(updates, optimizer)

    optimizer.add_param_group({"params": list(second.parameters())})

    with pytest.raises(ConfigError, match="SGD got other parameters after its first update"):
        check(updates, optimizer)


@pytest.mark.parametrize("kind", [Counting, torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_an_optimizer_that_counts_in_an_attribute_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    updates = refusals.Updates(tracked(model, optimizer))

    for _ in range(6):
        updates.check(optimizer, (optimizer,), {}, undo=True)
        model(torch.ones(2)).sum().backward()
        optimizer.step(lambda: model(torch.ones(2)).sum())

    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (kind is Counting)
    assert not warnings or "Counting changes its attribute slow at each update" in warnings[0]


@pytest.mark.parametrize(("index", "looked_at"), [(2, True), (3, False), (4, True), (12, False)])
@pytest.mark.parametrize("use_buffers", [True, False])
def test_an_average_whose_buffers_differ_by_rank_is_seen(
    caplog: pytest.LogCaptureFixture, index: int, *, looked_at: bool, use_buffers: bool
) -> None:
    """Its count does not: that changes alike on all ranks."""
    mine, ward = (Rank(shift, use_buffers=use_buffers) for shift in (0.0, 1.0))
    for _ in range(2):
        record, kept = mine.step(), ward.step()
        mine.tracked.buffers.refresh()

    found = refusals.has_late(Record.decode(record), kept, mine.tracked, index=index + 40, first=40)

    assert found is looked_at
    assert ("`average.module.running_mean`" in caplog.text) is looked_at
    assert "n_averaged" not in caplog.text


def test_an_average_whose_buffers_are_alike_is_none(caplog: pytest.LogCaptureFixture) -> None:
    mine, ward = (Rank(0.0, use_buffers=True) for _ in range(2))
    for _ in range(2):
        record, kept = mine.step(), ward.step()
        mine.tracked.buffers.refresh()

    assert not refusals.has_late(Record.decode(record), kept, mine.tracked, index=2, first=0)
    assert not caplog.text


@pytest.mark.parametrize(("gradient", "refused"), [(None, False), (0.0, False), (2.0, True)])
def test_a_step_that_opens_with_gradients_is_refused(gradient: float | None, refused: bool) -> None:
    model = nn.Linear(2, 2)
    found = tracked(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if gradient is not None:
        model.weight.grad = torch.full_like(model.weight, gradient)
    snapshot = Snapshot(found)

    if refused:
        with pytest.raises(StateError, match="gradients are present"):
            refusals.check_opening(found, snapshot)
    else:
        refusals.check_opening(found, snapshot)
