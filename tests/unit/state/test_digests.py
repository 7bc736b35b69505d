"""Digests by name: the same for the same values, and another one for every value that changes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tmover.state.capture import Tracked
from tmover.state.digests import digests
from tmover.state.position import Position
from tmover.state.records import Record


class Counter:
    def __init__(self) -> None:
        self.seen = [1]

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


class Trained:
    """A model after one step, and what belongs to it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        self.counter = Counter()
        self.model(torch.ones(2, 2)).sum().backward()
        self.optimizer.step()
        self.tracked = Tracked()
        self.tracked.track("model", self.model)
        self.tracked.track("optimizer", self.optimizer)
        self.tracked.track("scheduler", self.scheduler)
        self.tracked.track("counter", self.counter, per_rank=True)

    def digests(self, batch: int = 4) -> dict[str, str]:
        position = Position(0, batch, 7)
        return digests(self.tracked, Record.capture(self.tracked, position=position))


@pytest.fixture
def trained() -> Trained:
    random.seed(1)
    return Trained()


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_everything_has_a_name_that_a_person_can_find(trained: Trained) -> None:
    names = trained.digests().keys()

    assert {
        "random stream: python",
        "random stream: torch",
        "loader: position",
        "model.0.weight",
        "model.1.running_mean",
        "model: modules in eval mode",
        "optimizer of model.0.weight: exp_avg",
        "optimizer, group 0: lr",
        "scheduler: last_epoch",
        "counter: seen",
    } <= names


def test_what_does_not_change_keeps_its_digest(trained: Trained) -> None:
    assert trained.digests() == trained.digests()


def test_one_bit_changes_one_digest(trained: Trained) -> None:
    before = trained.digests()

    with torch.no_grad():
        weight = trained.model[0].weight
        assert isinstance(weight, torch.Tensor)
        weight.view(torch.int32)[1, 1] ^= 1

    assert changed(before, trained.digests()) == {"model.0.weight"}


def test_each_kind_of_state_has_a_digest_of_its_own(trained: Trained) -> None:
    before = trained.digests()

    trained.model[1].eval()
    trained.optimizer.param_groups[0]["lr"] = 0.5
    trained.counter.seen.append(2)
    random.random()

    assert changed(before, trained.digests(batch=5)) == {
        "model: modules in eval mode",
        "optimizer, group 0: lr",
        "counter: seen",
        "random stream: python",
        "loader: position",
    }


def test_the_order_of_elements_in_memory_does_not_matter(trained: Trained) -> None:
    before = trained.digests()
    weight = trained.model[0].weight
    assert isinstance(weight, nn.Parameter)

    weight.data = weight.data.t().contiguous().t()

    assert trained.digests() == before
