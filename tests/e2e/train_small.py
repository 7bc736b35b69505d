"""The script that end-to-end tests run: everything a real one has, in a few milliseconds a step.

Dropout, per-rank random streams, BatchNorm (whose running statistics differ by rank), AdamW, a
scheduler, a shuffled loader with random augmentation. `--hold STEP FILE` makes rank 0 wait, after
that step, until the file exists.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tmover


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are augmented at random, by all three sources of random numbers."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator)
        x = x + 0.1 * torch.randn(16) + random.random() + float(np.random.random())
        return x, x.sum().sin().view(1)


def build(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--hold", nargs=2, default=None)
    parser.add_argument("--fail-at", type=int, default=-1)
    arguments = parser.parse_args()
    session = tmover.init(seed=7)
    torch.manual_seed(0)
    model = DistributedDataParallel(build(arguments.hidden))
    torch.manual_seed(100 + session.rank)
    random.seed(200 + session.rank)
    np.random.seed(300 + session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    dataset = Noisy()
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(
        dataset, num_replicas=session.world_size, rank=session.rank
    )
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=arguments.workers)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for step in session.steps(loader, total=arguments.steps):
        with step:
            if step.index == arguments.fail_at and not session.sandbox:
                msg = "the script's own error"
                raise ValueError(msg)
            x, y = step.batch
            for part_x, part_y in zip(
                x.chunk(arguments.micro), y.chunk(arguments.micro), strict=True
            ):
                noise = 0.01 * (random.random() + float(np.random.random()))
                loss = nn.functional.mse_loss(model(part_x + noise), part_y)
                (loss / arguments.micro).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed and session.rank == 0:
            print("step", step.index, loss.item(), flush=True)
            _hold(arguments.hold, step.index)

    for last in session.final():
        with last:
            total = torch.tensor([float(session.rank)])
            torch.distributed.all_reduce(total)
            assert last.index == arguments.steps
        if last.committed and session.rank == 0:
            print("sum of ranks", total.item(), flush=True)


def _hold(hold: list[str] | None, index: int) -> None:
    if hold is not None and index == int(hold[0]):
        while not pathlib.Path(hold[1]).exists():
            time.sleep(0.005)


main()
