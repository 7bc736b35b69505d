"""Whether it is seen that a dataset changes as it is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from tmover.state.loader import Batches


class Cache(Dataset[Any]):
    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.found.setdefault(index, torch.zeros(1))


class Counter(Cache):
    n = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.n += 1
        return torch.zeros(1)


class Mix(Cache):
    last: torch.Tensor | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        self.last = torch.zeros(1)
        return self.last


class Calm(Cache):
    """Sets, and changes, what says nothing of what was read before."""

    def __init__(self) -> None:
        super().__init__()
        self.pass_ = 0
        self.weight = float("nan")
        self.file: object = None
        self.table = np.zeros(4)

    def set_epoch(self, number: int) -> None:
        self.pass_ = number

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file = self.file or object()
        self.weight = float("nan")
        return torch.tensor(index)


class Passes(IterableDataset[Any]):
    """Counts its passes by itself."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        yield from torch.arange(8) + self.passes


class Calmly(IterableDataset[Any]):
    """Is told its pass."""

    def __init__(self) -> None:
        self.pass_ = 0

    def set_epoch(self, number: int) -> None:
        self.pass_ = number

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(4)


class Said(Passes):
    """Says so by its state."""

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Steps:
    """An iterator that says where it stands, of a dataset that does not."""

    def __init__(self) -> None:
        self.step = -1

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> torch.Tensor:
        self.step += 1
        if self.step == 8:
            raise StopIteration
        return torch.tensor(self.step)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Opened(IterableDataset[Any]):
    def __init__(self) -> None:
        self.opened = 0

    def __iter__(self) -> Steps:
        self.opened += 1
        return Steps()


class Own:
    """A loader of the script's own."""

    def __init__(self) -> None:
        self.cursor = 0

    def __iter__(self) -> Iterator[int]:
        while self.cursor < 8:
            self.cursor += 1
            yield self.cursor


def collate(samples: list[Any], seen: list[int] = []) -> Any:  # noqa: B006 - what is tried
    seen.append(len(samples))
    return torch.stack(samples)


def read(loader: Any, batches: int = 5) -> Batches:
    """Return the batches of a loader after some, as the loop has them."""
    made = Batches(loader, seed=5, rank=0)
    made.mistrust()
    for _ in range(batches):
        made.next()
    made.close()
    return made


@pytest.mark.parametrize(
    ("loader", "change"),
    [
        (DataLoader(Cache(), batch_size=2), "the dataset `Cache` changes its `found`"),
        (DataLoader(Counter(), batch_size=2), "the dataset `Counter` changes its `n`"),
        (DataLoader(Mix(), batch_size=2), "the dataset `Mix` changes its `last`"),
        (DataLoader(Subset(Counter(), [1, 2]), 2), "the dataset `Counter` changes its `n`"),
        (DataLoader(Passes(), batch_size=2), "the dataset `Passes` changes its `passes`"),
        (DataLoader(Opened(), batch_size=2), "the dataset `Opened` changes its `opened`"),
        (Own(), "the loader `Own` changes its `cursor`"),
        (
            DataLoader(Calm(), batch_size=2, collate_fn=collate),
            "the collate_fn `collate` changes its `seen`",
        ),
    ],
)
def test_what_keeps_something_from_sample_to_sample_is_named_once_in_the_log(
    loader: Any, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes = read(loader).changes()

    (record,) = caplog.records
    assert changes == (change,)
    assert record.levelno == logging.WARNING
    assert record.message.startswith(f"{change} as it is read: a joiner begins with its own")
    assert "`tmover check-loader SCRIPT` tells whether that changes a batch" in record.message


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Calm(), batch_size=4),
        DataLoader(Calmly(), batch_size=2),
        DataLoader(Said(), batch_size=2),
        [1, 2, 3],
    ],
)
def test_what_is_told_its_pass_opens_a_file_or_has_a_state_is_not_warned_of(
    loader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    changes = read(loader).changes()

    assert changes == ()
    assert caplog.records == []


def test_a_dataset_that_is_read_in_loader_workers_is_not_looked_at() -> None:
    assert read(DataLoader(Counter(), batch_size=2, num_workers=1), 1).changes() == ()


def test_changes_are_found_without_a_word_where_nobody_mistrusts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batches = Batches(DataLoader(Counter(), batch_size=2), seed=5, rank=0)

    batches.next()

    assert batches.changes() == ("the dataset `Counter` changes its `n`",)
    assert caplog.records == []
