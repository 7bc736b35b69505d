"""Every optimizer that torch has, in each way it can be made, goes on elsewhere with its bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tmover.state.capture import Tracked
from unit.state.conftest import HandOver

FLAGS = (
    "fused",
    "foreach",
    "amsgrad",
    "maximize",
    "centered",
    "nesterov",
    "decoupled_weight_decay",
)
"""What makes other state, or the same by other kernels. `capturable` needs a device, and
`differentiable` parameters that are no leaves."""
NEEDED: dict[tuple[str, str], dict[str, Any]] = {("SGD", "nesterov"): {"momentum": 0.9}}
MORE: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}],
    "RMSprop": [{"momentum": 0.9}],
    "LBFGS": [{"line_search_fn": "strong_wolfe"}],
}
ONLY_MATRICES = {"Muon"}


class Way(NamedTuple):
    """An optimizer's class, and how it is made."""

    kind: Any
    options: dict[str, Any]

    def __str__(self) -> str:
        return " ".join([self.kind.__name__, *self.options])


def ways() -> Iterator[Way]:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        if not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
            continue
        name, known = kind.__name__, inspect.signature(kind).parameters
        yield Way(kind, {})
        for flag in FLAGS:
            if flag in known:
                yield Way(kind, {flag: True, **NEEDED.get((name, flag), {})})
        for options in MORE.get(name, []):
            yield Way(kind, options)


class Side:
    """Some parameters and their optimizer, on one rank."""

    def __init__(self, way: Way, seed: int) -> None:
        torch.manual_seed(seed)
        matrices = [torch.randn(4, 3), torch.randn(3, 3)]
        others = [] if way.kind.__name__ in ONLY_MATRICES else [torch.randn(5), torch.randn(())]
        self.parameters = nn.ParameterList(nn.Parameter(each) for each in [*matrices, *others])
        self.optimizer = way.kind(self.parameters.parameters(), **way.options)
        self._sparse = way.kind is torch.optim.SparseAdam
        self.tracked = Tracked()
        self.tracked.track("parameters", self.parameters)
        self.tracked.track("optimizer", self.optimizer)

    def train(self, *, steps: int, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            goals = [torch.randn(p.shape, generator=noise) for p in self.parameters]
            self.optimizer.step(self._closure(goals))

    def _closure(self, goals: list[torch.Tensor]) -> Callable[[], float]:
        def evaluate() -> float:
            self.optimizer.zero_grad()
            pairs = zip(self.parameters, goals, strict=True)
            loss = torch.stack([(p - goal).square().sum() for p, goal in pairs]).sum()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            for p in self.parameters if self._sparse else ():
                assert p.grad is not None
                p.grad = p.grad.to_sparse()
            return loss.item()

        return evaluate


@pytest.mark.parametrize("steps_before", [0, 2], ids=["lazy", "rehearsed"])
@pytest.mark.parametrize("way", [*ways()], ids=str)
def test_it_goes_on_to_the_bit(way: Way, steps_before: int, hand_over: HandOver) -> None:
    source, target = Side(way, 1), Side(way, 2)
    source.train(steps=3, seed=5)
    target.train(steps=steps_before, seed=6)

    hand_over(source.tracked, target.tracked)

    assert target.tracked.digest() == source.tracked.digest()
    source.train(steps=4, seed=7)
    at_hand_over = target.tracked.digest()
    target.train(steps=4, seed=7)
    assert target.tracked.digest() == source.tracked.digest() != at_hand_over


def test_those_that_torch_has_are_here() -> None:
    found = {way.kind.__name__ for way in ways()}

    assert found >= {
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adafactor"),
        *("RMSprop", "Rprop", "ASGD", "SparseAdam", "LBFGS"),
    }
    assert {str(way) for way in ways()} >= {"Adam fused", "AdamW foreach", "SGD nesterov momentum"}
