"""A script that trains on a stream: `--data` says of what kind, `--workers` how many fetch it.

`state`: a dataset that says where it stands. `replay`: one that does not. `own`: a loader of
somebody's own, which fetches ahead and says what it has handed out. `counted`: no stream, but
numbered samples that depend on how many were read before.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import tmover

LENGTH = 40
"""So many samples a rank has in a pass: one of the runs goes through several."""


class Stream(IterableDataset[torch.Tensor]):
    """A rank's samples, augmented at random, split among loader workers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def numbers(self) -> range:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        return range(first, LENGTH, stride)

    def sample(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.rank + number)
        return torch.randn(16, generator=generator) + 0.1 * torch.randn(16) + random.random()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.sample, self.numbers())


class Stateful(Stream):
    """It says where it stands."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in self.numbers()[self.at :]:
            self.at += 1
            yield self.sample(number)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Own:
    """A loader that has more in hand than it has handed out."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.given = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        stream = Stream(self.rank)
        numbers = iter(stream.numbers()[4 * self.given :])
        ahead = list(itertools.islice(numbers, 8))
        while ahead:
            now, ahead = ahead[:4], [*ahead[4:], *itertools.islice(numbers, 4)]
            self.given += 1
            yield torch.stack([stream.sample(number) for number in now])
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Counted(Dataset[torch.Tensor]):
    """It returns something else whenever it is asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.read = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.full((16,), float(self.read))


def loader_of(data: str, rank: int, workers: int) -> Any:
    if data == "own":
        return Own(rank)
    kinds = {"state": Stateful, "replay": Stream, "counted": Counted}
    dataset: Dataset[torch.Tensor] = kinds[data](rank)
    return DataLoader(dataset, batch_size=4, num_workers=workers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--data", default="state")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--hold", nargs=2, default=None)
    arguments = parser.parse_args()
    session = tmover.init(seed=7)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.track(model=model, optimizer=optimizer)
    loader = loader_of(arguments.data, session.rank, arguments.workers)
    for step in session.steps(loader, total=arguments.steps):
        with step:
            x = step.batch
            loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True).sin())
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and session.rank == 0 and arguments.hold is not None:
            while step.index == int(arguments.hold[0]) and not (
                pathlib.Path(arguments.hold[1]).exists()
            ):
                time.sleep(0.005)


main()
