"""Every scheduler that torch has goes on elsewhere: learning rates, momenta and betas alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tmover.state.capture import Tracked
from unit.state.conftest import HandOver

Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 1 - 0.01 * step),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=6), lr_scheduler.ExponentialLR(o, 0.9)], [6]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 6), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.001, anneal_epochs=8),
}
METRICS = (5.0, 4.0, 4.5, 4.6, 4.4, 4.3, 4.9, 3.0, 3.5, 3.6)
BEFORE = 4
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "betas": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
}


class Side:
    """An optimizer and its scheduler, on one rank."""

    def __init__(self, optimizer: str, scheduler: str) -> None:
        self.optimizer = OPTIMIZERS[optimizer](nn.Linear(1, 1))
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.tracked = Tracked()
        self.tracked.track("scheduler", self.scheduler)
        self.tracked.track("optimizer", self.optimizer)

    def advance(self, first: int, last: int) -> list[dict[str, Any]]:
        """Return the numbers of the optimizer's group after each of these steps."""
        found = []
        for step in range(first, last):
            self.optimizer.step()
            by_metric = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([METRICS[step]] if by_metric else []))
            (group,) = self.optimizer.param_groups
            found.append({key: value for key, value in group.items() if key != "params"})
        return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_it_goes_on_where_it_was(scheduler: str, optimizer: str, hand_over: HandOver) -> None:
    source, target, twin = (Side(optimizer, scheduler) for _ in range(3))
    expected = twin.advance(0, len(METRICS))
    source.advance(0, BEFORE)
    target.advance(0, 2)

    hand_over(source.tracked, target.tracked)

    assert target.tracked.digest() == source.tracked.digest()
    assert target.advance(BEFORE, len(METRICS)) == expected[BEFORE:]
    assert len({group["lr"] for group in expected}) > 1


def test_all_that_torch_has_are_here() -> None:
    bases = {"LRScheduler", "_LRScheduler"}
    theirs = {
        kind.__name__
        for kind in vars(lr_scheduler).values()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }

    assert theirs - bases == set(SCHEDULERS) - {"SWALR"}
