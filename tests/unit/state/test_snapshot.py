from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tmover.errors import StateError
from tmover.state.capture import Tracked
from tmover.state.snapshot import Snapshot


class Loop:
    """A model that trains with everything that an attempt can change."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: 0.5**i)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.metrics = Metrics()
        self.tracked = Tracked()
        for name in ("model", "optimizer", "scheduler", "scaler", "metrics"):
            self.tracked.track(name, getattr(self, name))

    def attempt(self) -> float:
        """A step as far as the vote, told apart by what it computes."""
        x = torch.randn(3, 4) * random.random() + float(np.random.rand())
        loss = self.model(x).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.scheduler.step()
        self.metrics.total += loss.detach()
        self.metrics.losses.append(loss.item())
        return float(loss.item())

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Metrics:
    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.copy_(state["total"])
        self.losses = state["losses"]


@pytest.fixture
def loop() -> Loop:
    torch.manual_seed(0)
    return Loop()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("broken", [1, 2])
def test_a_step_done_again_ends_as_if_nothing_had_happened(broken: int) -> None:
    digests = []
    for attempts in (1, 1 + broken):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        loop = Loop()
        losses = []
        for _ in range(3):
            snapshot = Snapshot(loop.tracked)
            for _ in range(attempts - 1):
                loop.attempt()
                snapshot.restore(loop.tracked)
            losses.append(loop.attempt())
            loop.update()
        digests.append((loop.tracked.digest(), losses, loop.metrics.losses))

    assert digests[0] == digests[1]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_is_restored_shares_nothing_with_the_snapshot(loop: Loop) -> None:
    snapshot = Snapshot(loop.tracked)
    before = loop.tracked.digest()

    for _ in range(3):
        loop.attempt()
        loop.model.zero_grad()
        assert loop.tracked.digest() != before
        snapshot.restore(loop.tracked)
        assert loop.tracked.digest() == before


@pytest.mark.parametrize("entry", ["none", "zero"])
def test_gradients_go_back_to_what_they_were(entry: str, loop: Loop) -> None:
    weight: Any = loop.model[0].weight
    if entry == "zero":
        loop.model(torch.randn(3, 4)).sum().backward()
        loop.optimizer.zero_grad(set_to_none=False)
    gradient = weight.grad
    snapshot = Snapshot(loop.tracked)

    loop.model(torch.randn(3, 4)).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.any()
    snapshot.restore(loop.tracked)

    assert weight.grad is gradient
    assert gradient is None or not gradient.any()


def test_gradients_that_the_attempt_removed_come_back_as_zeros(loop: Loop) -> None:
    weight: Any = loop.model[0].weight
    weight.grad = torch.zeros_like(weight)
    snapshot = Snapshot(loop.tracked)

    loop.optimizer.zero_grad()
    snapshot.restore(loop.tracked)

    assert weight.grad is not None
    assert not weight.grad.any()


def test_gradients_of_what_only_an_optimizer_knows_go_back_too() -> None:
    parameter = nn.Parameter(torch.ones(1))
    tracked = Tracked()
    tracked.track("o", torch.optim.SGD([parameter]))
    snapshot = Snapshot(tracked)

    torch.autograd.backward(parameter.square().sum())
    snapshot.restore(tracked)

    assert parameter.grad is None


def test_modes_go_back(loop: Loop) -> None:
    loop.model[2].eval()
    snapshot = Snapshot(loop.tracked)

    loop.model.eval()
    loop.model[2].train()
    snapshot.restore(loop.tracked)

    assert [m.training for m in loop.model.modules()] == [True, True, True, False]


def by_hand(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.fill_(7)


def through_data(weight: torch.Tensor) -> None:
    weight.data.sub_(0.5)


@pytest.mark.parametrize("update", [by_hand, through_data])
@pytest.mark.parametrize("look", [Snapshot.refuse_updates, Snapshot.restore])
def test_a_parameter_that_changed_before_the_vote_is_refused_not_changed_twice(
    update: Callable[[torch.Tensor], None], look: Callable[[Snapshot, Tracked], None]
) -> None:
    model = nn.Linear(1, 1)
    tracked = Tracked()
    tracked.track("m", model)
    snapshot = Snapshot(tracked)
    look(snapshot, tracked)

    update(model.weight)

    with pytest.raises(StateError, match="tracked `m`: parameter `weight` changed inside `with"):
        look(snapshot, tracked)


def test_a_counted_change_of_a_parameter_is_noticed_at_any_step() -> None:
    model = nn.Linear(1, 1)
    tracked = Tracked()
    tracked.track("m", model)
    for _ in range(10):
        snapshot = Snapshot(tracked)

    by_hand(model.bias)

    with pytest.raises(StateError, match="parameter `bias` changed"):
        snapshot.refuse_updates(tracked)


def test_parameters_that_are_not_a_number_have_not_changed() -> None:
    model = nn.Linear(1, 1)
    by_hand(model.weight)
    model.weight.data.fill_(float("nan"))
    tracked = Tracked()
    tracked.track("m", model)

    Snapshot(tracked).refuse_updates(tracked)


def test_a_tensor_learning_rate_goes_back_in_place() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=torch.tensor(0.5))
    tracked = Tracked()
    tracked.track("o", optimizer)
    rate = optimizer.param_groups[0]["lr"]
    snapshot = Snapshot(tracked)

    rate.mul_(0.1)
    snapshot.restore(tracked)

    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


class Averages:
    def __init__(self) -> None:
        self.weights = torch.zeros(1 << 20)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def test_a_large_tensor_of_an_object_is_not_copied_and_may_not_change_before_the_vote() -> None:
    averages = Averages()
    tracked = Tracked()
    tracked.track("ema", averages)
    snapshot = Snapshot(tracked)

    snapshot.restore(tracked)
    averages.weights.add_(1)
    snapshot.restore(tracked)
    assert not averages.weights.any()

    snapshot = Snapshot(tracked)
    averages.weights.add_(1)
    with pytest.raises(StateError, match=r"tracked `ema`: state_dict\(\) holds a large tensor"):
        snapshot.restore(tracked)


def test_only_the_latest_snapshot_can_be_restored(loop: Loop) -> None:
    first = Snapshot(loop.tracked)
    Snapshot(loop.tracked)

    with pytest.raises(StateError, match="only the latest"):
        first.restore(loop.tracked)


def test_given_streams_are_what_is_gone_back_to(loop: Loop) -> None:
    from tmover.state import rng

    with rng.isolated(11):
        streams = rng.capture()
        expected = random.random()

    Snapshot(loop.tracked, streams=streams).restore(loop.tracked)

    assert random.random() == expected


class Seen(nn.Module):
    """Counts its forwards in its extra state, and in what it adds to its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = self.added = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.added += 1
        return x * self.weight * self.seen * self.added

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}added"] = self.added

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.added = state.pop(f"{prefix}added", self.added)
        super()._load_from_state_dict(state, prefix, *args)


def test_what_a_module_adds_to_its_state_dict_goes_back_with_the_step() -> None:
    module = Seen()
    tracked = Tracked()
    tracked.track("model", nn.Sequential(module))
    module.seen, module.added = 3, 4
    snapshot = Snapshot(tracked)

    for _ in range(2):
        module(torch.ones(1))
        snapshot.restore(tracked)

    assert (module.seen, module.added) == (3, 4)
