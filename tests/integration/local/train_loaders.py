"""A script for `tmover check-loader`: `train_loaders.py KIND WORKERS` has a loader of that kind."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

import tmover


class Noisy(Dataset[Any]):
    """Numbered samples with noise from the global streams."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 47

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random()


class Cursed(Noisy):
    """What it returns depends on what was read before."""

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return index, self.read


class Unrepeatable(Noisy):
    """Noise that nobody can draw again."""

    def __getitem__(self, index: int) -> Any:
        return index, int.from_bytes(os.urandom(4), "little")


class Stream(IterableDataset[Any]):
    """A stream with a state, as of what it has yielded."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.at * stride < 40:
            self.at += 1
            yield first + (self.at - 1) * stride, torch.rand(1)

    def set_rank(self, rank: int) -> None:
        """Every rank reads the same."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Shuffled(Stream):
    """A stream that shuffles in a buffer, of which its state says nothing."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for each in super().__iter__():
            buffer.append(each)
            if len(buffer) == 6:
                yield buffer.pop(random.randrange(6))
        yield from buffer


def kinds(session: tmover.Session, kind: str, workers: int) -> Any:
    if kind in ("stream", "shuffled"):
        dataset = Stream() if kind == "stream" else Shuffled()
        return DataLoader(dataset, batch_size=3, num_workers=workers)
    mine: Dataset[Any] = {"cursed": Cursed, "unrepeatable": Unrepeatable}.get(kind, Noisy)()
    world = 1 if kind == "everything" else session.world_size
    sampler: DistributedSampler[Any] = DistributedSampler(
        mine,
        num_replicas=world,
        rank=0 if kind == "everything" else session.rank,
        seed=session.rank if kind == "apart" else 0,
    )
    return DataLoader(mine, batch_size=3, sampler=sampler, num_workers=workers)


def main() -> None:
    kind, workers = sys.argv[1], int(sys.argv[2])
    session = tmover.init()
    if kind == "early":
        return
    for step in session.steps(kinds(session, kind, workers)):
        with step:
            raise SystemExit(9)  # nothing is trained here


main()
