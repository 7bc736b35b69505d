"""The script of end-to-end tests in which a step has collectives after its first update.

`--what gan` updates two models that learn from each other; `zero` has an optimizer whose update
broadcasts what each rank has updated; `closure` evaluates the model within the update.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tmover
from tmover.worker.session import Session

Batch = torch.Tensor


def small(width: int) -> DistributedDataParallel:
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(width, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 8))
    )


def gan(session: Session) -> Callable[[Batch], torch.Tensor]:
    maker, judge = small(8), small(8)
    first = torch.optim.Adam(maker.parameters(), lr=1e-2)
    second = torch.optim.SGD(judge.parameters(), lr=1e-2, momentum=0.9)
    session.track(maker=maker, judge=judge, first=first, second=second)

    def update(x: Batch) -> torch.Tensor:
        second.zero_grad()
        worth = judge(x).mean() - judge(maker(torch.randn_like(x)).detach()).mean()
        worth.backward()
        second.step()
        first.zero_grad()
        cost: torch.Tensor = judge(maker(torch.randn_like(x))).mean()
        cost.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        first.step()
        first.zero_grad()
        second.zero_grad()
        return cost

    return update


def zero(session: Session) -> Callable[[Batch], torch.Tensor]:
    model = small(8)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
    )
    session.track(model=model, optimizer=optimizer)

    def update(x: Batch) -> torch.Tensor:
        loss: torch.Tensor = (model(x + 0.1 * torch.randn_like(x)) - x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return update


def closure(session: Session) -> Callable[[Batch], torch.Tensor]:
    model = small(8)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    session.track(model=model, optimizer=optimizer)

    def update(x: Batch) -> torch.Tensor:
        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(x) - x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            return loss

        loss = optimizer.step(evaluate)  # type: ignore[no-untyped-call]  # torch has none here
        optimizer.zero_grad()
        return torch.as_tensor(loss)

    return update


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--what", choices=["gan", "zero", "closure"], default="gan")
    arguments = parser.parse_args()

    session = tmover.init(seed=7)
    torch.manual_seed(0)
    update = {"gan": gan, "zero": zero, "closure": closure}[arguments.what](session)
    torch.manual_seed(100 + session.rank)
    random.seed(200 + session.rank)
    np.random.seed(300 + session.rank)
    data = TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(1)))
    sampler: DistributedSampler[Batch] = DistributedSampler(
        data, num_replicas=session.world_size, rank=session.rank
    )
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for step in session.steps(loader, total=arguments.steps, undo=True):
        with step:
            (x,) = step.batch
            cost = update(x)
        if step.committed and session.rank == 0:
            print("step", step.index, cost.item(), flush=True)


main()
