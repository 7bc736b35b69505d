"""torchdata's loaders: placed exactly, and what a script saves of them leads back there."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tmover.core.events import Placing
from tmover.errors import ConfigError
from tmover.state.loader import Batches, Position

stateful = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install torchdata"
)
nodes = pytest.importorskip("torchdata.nodes", reason="this torchdata has no nodes")
sampler = pytest.importorskip("torchdata.stateful_dataloader.sampler")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Noisy(Dataset[Any]):
    """Numbered samples, augmented at random."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1), random.random()


class Cursor(IterableDataset[Any]):
    """A stream split among loader workers, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.at * stride < 23:
            self.at += 1
            yield first + (self.at - 1) * stride, torch.rand(1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stream(IterableDataset[Any]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(9):
            yield number, torch.rand(1)


def distributed() -> Any:
    mine = sampler.StatefulDistributedSampler(Noisy(), num_replicas=2, rank=0)
    return stateful.StatefulDataLoader(Noisy(), batch_size=3, sampler=mine, num_workers=2)


def ahead() -> Any:
    """A graph of nodes that fetches ahead in a thread."""
    source = nodes.IterableWrapper(range(13))
    return nodes.Loader(nodes.Prefetcher(nodes.Batcher(source, 2, drop_last=False), 4))


Make = Callable[[], Any]
LOADERS: dict[str, tuple[Make, Placing]] = {
    "shuffled": (
        lambda: stateful.StatefulDataLoader(Noisy(), batch_size=3, shuffle=True),
        Placing.NUMBER,
    ),
    "distributed, workers": (distributed, Placing.NUMBER),
    "stream": (lambda: stateful.StatefulDataLoader(Cursor(), batch_size=3), Placing.STATE),
    "stream, workers": (
        lambda: stateful.StatefulDataLoader(
            Cursor(), batch_size=3, num_workers=2, prefetch_factor=4, snapshot_every_n_steps=5
        ),
        Placing.STATE,
    ),
    "stream without a state": (
        lambda: stateful.StatefulDataLoader(Stream(), batch_size=3, num_workers=1),
        Placing.REPLAY,
    ),
    "nodes": (ahead, Placing.STATE),
}


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


@contextlib.contextmanager
def batches(loader: Any) -> Iterator[Batches]:
    made = Batches(loader, seed=5, rank=0)
    try:
        yield made
    finally:
        made.close()
        if hasattr(loader, "_it"):
            loader._it = None  # its thread ends with it
        gc.collect()


@pytest.mark.parametrize("name", LOADERS)
def test_a_fresh_loader_goes_on_from_any_position(name: str) -> None:
    make, placing = LOADERS[name]
    torch.manual_seed(77)
    with batches(make()) as source:
        assert source.placing is placing
        positions, values = [source.position()], []
        for _ in range(13):
            values.append(plain(source.next()))
            positions.append(source.position())
    end = next(i for i, position in enumerate(positions) if position.pass_) - 1

    for at in (2, end - 1, end, end + 1):
        torch.manual_seed(123)
        with batches(make()) as joiner:
            joiner.next()
            joiner.next()
            joiner.seek(positions[at])
            assert [plain(joiner.next()) for _ in range(2)] == values[at : at + 2], at
            assert joiner.position() == positions[at + 2]


@pytest.mark.parametrize("name", ["shuffled", "stream, workers"])
def test_what_a_script_saves_of_its_loader_leads_back_there(name: str) -> None:
    make, _ = LOADERS[name]
    torch.manual_seed(77)
    loader = make()
    with batches(loader) as source:
        for _ in range(3):
            source.next()
        saved = loader.state_dict()
        rest = [plain(source.next()) for _ in range(3)]

    again = make()
    again.load_state_dict(saved)
    with batches(again) as source:
        assert source.position().batch == 3
        assert [plain(source.next()) for _ in range(3)] == rest


def test_a_state_that_was_saved_outside_of_a_loop_is_refused() -> None:
    loader = stateful.StatefulDataLoader(Noisy(), batch_size=3)
    next(iter(loader))
    other = stateful.StatefulDataLoader(Noisy(), batch_size=3)
    other.load_state_dict(loader.state_dict())

    with pytest.raises(ConfigError, match="does not say where the loop of a session stood"):
        Batches(other, seed=5, rank=0)


def test_its_own_sampler_is_seeded_by_the_pass_and_not_by_chance() -> None:
    orders = []
    for _ in range(2):
        torch.manual_seed(77)
        with batches(LOADERS["shuffled"][0]()) as source:
            source.seek(Position(1, 0, source.position().seed))
            orders.append(source.next()[0].tolist())

    assert orders[0] == orders[1]
