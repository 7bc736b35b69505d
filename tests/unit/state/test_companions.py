"""What scripts hold beside a plain model: averages, loss scalers, frozen and tied parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tmover.state.capture import Tracked
from tmover.state.snapshot import Snapshot
from unit.state.conftest import HandOver


def tracked(**objects: Any) -> Tracked:
    result = Tracked()
    for name, obj in objects.items():
        result.track(name, obj)
    return result


_EMA: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]  # torch has no types here


def small(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("ema", [False, True], ids=["mean", "ema"])
def test_an_averaged_model_goes_on(ema: bool, use_buffers: bool, hand_over: HandOver) -> None:
    def build(seed: int, updates: int) -> tuple[nn.Module, AveragedModel, Tracked]:
        model = small(seed)
        average = AveragedModel(
            model,
            multi_avg_fn=_EMA if ema else None,
            use_buffers=use_buffers,
        )
        follow(model, average, updates)
        return model, average, tracked(model=model, average=average)

    def follow(model: nn.Module, average: AveragedModel, updates: int) -> None:
        for _ in range(updates):
            model(torch.randn(4, 3))
            for parameter in model.parameters():
                parameter.data += 1
            average.update_parameters(model)

    source, target = build(1, 3), build(2, 1)

    hand_over(source[2], target[2])

    assert int(target[1].n_averaged) == 3
    for model, average, _ in (source, target):
        torch.manual_seed(4)
        follow(model, average, 2)
    assert target[2].digest() == source[2].digest()


def test_a_loss_scaler_grows_and_shrinks_when_it_would_have(hand_over: HandOver) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, Tracked]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        return model, optimizer, scaler, tracked(m=model, o=optimizer, s=scaler)

    def scales(side: Any, factors: tuple[float, ...]) -> list[float]:
        model, optimizer, scaler, _ = side
        found = []
        for factor in factors:
            scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(scaler.get_scale())
        return found

    inf = float("inf")
    source, target, twin = build(), build(), build()
    assert scales(twin, (1, 1)) == scales(source, (1, 1)) == [8.0, 8.0]
    scales(target, (inf,))

    hand_over(source[3], target[3])

    rest = (1, 1, inf, 1)
    assert scales(target, rest) == scales(twin, rest) == [16.0, 16.0, 8.0, 8.0]


def test_what_was_frozen_or_thawed_since_is_so_on_the_joiner(hand_over: HandOver) -> None:
    source, target = small(1), small(2)
    source[0].requires_grad_(False)
    target[2].requires_grad_(False)

    hand_over(tracked(m=source), tracked(m=target))

    flags = [parameter.requires_grad for parameter in target.parameters()]
    assert flags == [parameter.requires_grad for parameter in source.parameters()]
    assert flags == [False, False, True, True, True, True]
    assert all(map(torch.equal, target.parameters(), source.parameters()))


def test_a_broken_step_freezes_nothing() -> None:
    model = small(1)
    model[0].requires_grad_(False)
    registry = tracked(m=model)
    snapshot = Snapshot(registry)
    before = registry.digest()

    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    assert registry.digest() != before
    snapshot.restore(registry)

    assert registry.digest() == before
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]


def test_tied_parameters_stay_tied_and_are_trained_as_one(hand_over: HandOver) -> None:
    def build(seed: int) -> tuple[nn.Sequential, Any, Tracked]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
        model[2].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, tracked(m=model, o=optimizer)

    def train(side: Any) -> None:
        model, optimizer, _ = side
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    source, target = build(1), build(2)
    train(source)

    hand_over(source[2], target[2])
    train(source)
    train(target)

    assert target[0][2].weight is target[0][0].weight
    assert target[2].digest() == source[2].digest()


def test_statistics_of_a_batch_norm_go_on(hand_over: HandOver) -> None:
    source, target = small(1), small(2)
    source(torch.randn(8, 3))
    live = target[1].running_mean

    hand_over(tracked(m=source), tracked(m=target))

    assert target[1].running_mean is live
    assert int(target[1].num_batches_tracked) == 1  # type: ignore[arg-type]
    x = torch.randn(8, 3)
    assert torch.equal(source(x), target(x))
    assert torch.equal(source[1].running_var, target[1].running_var)  # type: ignore[arg-type]
