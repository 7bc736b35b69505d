"""What of a loader no joiner could go on with is found, wherever it hides."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import logging
import os
import random
import secrets
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    default_collate,
)

from tmover.state import generators
from tmover.state.ranked import sampler_chain

RNG = np.random.default_rng(1)
SHARED = torch.Generator()
LOG = logging.getLogger(__name__)


class Plain(Dataset[Any]):
    """Numbered samples, with whatever it is given to hold."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index


class Transform:
    """Something callable with a generator, out of sight of `vars`."""

    __slots__ = ("dice",)

    def __init__(self) -> None:
        self.dice = random.Random(1)

    def __call__(self, value: Any) -> Any:
        return value + self.dice.random()


class UsesGlobal(Plain):
    def __getitem__(self, index: int) -> Any:
        return self.noisy(index)

    def noisy(self, index: int) -> Any:
        return [index + RNG.random() for _ in range(2)]


class UsesSecrets(Plain):
    def __getitem__(self, index: int) -> Any:
        return secrets.randbelow(index + 1)


class UsesUrandom(Plain):
    def __getitem__(self, index: int) -> Any:
        return index, os.urandom(4)


class Library(Plain):
    """Uses a part of Python that has a generator of its own, which names files."""

    def __getitem__(self, index: int) -> Any:
        LOG.debug("reading %s", index)
        with tempfile.TemporaryFile() as file:
            return file.write(b"x")


class GlobalStreams(Plain):
    """All that is seeded for every batch."""

    def __getitem__(self, index: int) -> Any:
        return random.random() + np.random.rand() + torch.rand(1)

    def unused(self) -> Any:
        return RNG.random()


def closed_over() -> Callable[[Any], Any]:
    dice = random.Random(1)

    def collate(samples: Any) -> Any:
        dice.shuffle(samples)
        return default_collate(samples)

    return collate


def shaken(samples: Any, dice: Any) -> Any:
    dice.shuffle(samples)
    return default_collate(samples)


class Nested(Sampler[int]):
    """A sampler that holds its generator in a list."""

    def __init__(self) -> None:
        self.held = [torch.Generator()]

    def __iter__(self) -> Any:
        return iter(torch.randperm(8, generator=self.held[0]).tolist())

    def __len__(self) -> int:
        return 8


def found(loader: Any) -> str:
    return generators.obstacle(loader, sampler_chain(loader))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Plain(a={"b": [Transform()]})), "`Plain.a['b'][0].dice` is a random generator"),
        (DataLoader(Subset(Plain(dice=SHARED), [1])), "`Subset.dataset.dice` is a random"),
        (DataLoader(ConcatDataset([Plain(), Plain(a=RNG)])), "`ConcatDataset.datasets[1].a` is a"),
        (DataLoader(UsesGlobal()), "`RNG` is a random generator"),
        (DataLoader(Plain(), collate_fn=closed_over()), "`dice` is a random generator"),
        (
            DataLoader(Plain(), collate_fn=functools.partial(shaken, dice=random.Random(1))),
            "is a random generator",
        ),
        (DataLoader(UsesSecrets()), "`secrets` draws from the operating system"),
        (DataLoader(UsesUrandom()), "`os.urandom` draws from the operating system"),
        (DataLoader(Plain(), sampler=Nested()), "`Nested.held[0]` is a random generator"),
        (DataLoader(Plain(lines=iter([1, 2]))), "`Plain.lines` is an iterator"),
        (DataLoader(Plain(lines=(n for n in [1]))), "`Plain.lines` is an iterator"),
        (DataLoader(Plain(lines=map(str, [1]))), "`Plain.lines` is an iterator"),
        (DataLoader(Plain(reader=threading.Thread())), "`Plain.reader` works beside the loader"),
        (
            DataLoader(Plain(pool=concurrent.futures.ThreadPoolExecutor(1))),
            "`Plain.pool` works beside the loader",
        ),
    ],
    ids=lambda value: value.split("`")[1] if isinstance(value, str) and "`" in value else None,
)
def test_what_stands_where_no_record_says_is_named(loader: Any, words: str) -> None:
    assert words in found(loader)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(GlobalStreams(choose=random.choice, draw=np.random.rand)),
        DataLoader(Plain(lock_free=[1, "two", b"3", torch.ones(2), np.ones(2)])),
        DataLoader(Plain(), sampler=RandomSampler(Plain(), generator=SHARED)),
        DataLoader(Plain(), shuffle=True, generator=SHARED, num_workers=1),
        DataLoader(Plain(transform=torch.nn.Sequential(torch.nn.Dropout()))),
        DataLoader(Library(log=LOG, ids=itertools.count())),
        DataLoader(Plain(client=[[[threading.Thread()]]])),
    ],
    ids=["global streams", "values", "sampler's", "shuffle", "module", "library", "far away"],
)
def test_what_is_seeded_by_us_or_holds_still_is_not_complained_of(loader: Any) -> None:
    assert found(loader) == ""


def test_a_dataset_that_refers_to_itself_is_gone_through_once() -> None:
    dataset = Plain()
    dataset.me = [dataset]  # type: ignore[attr-defined]

    assert found(DataLoader(dataset)) == ""


def test_what_has_a_state_of_its_own_is_believed() -> None:
    class Saved(IterableDataset[Any]):
        def __init__(self) -> None:
            self.dice = random.Random(1)

        def __iter__(self) -> Any:
            return iter([self.dice.random()])

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Nothing to load."""

    assert found(DataLoader(Saved())) == ""
