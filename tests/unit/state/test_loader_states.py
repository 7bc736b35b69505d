"""Loaders and datasets that say themselves where they stand."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from tmover.core.events import Placing
from tmover.errors import ConfigError, StateError
from tmover.state.loader import Batches, Position
from tmover.state.packed import LIMIT_BYTES, pack, unpack

SEED = 5
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Cursor(IterableDataset[Any]):
    """A stream split among loader workers, which counts what it has read, and augments."""

    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.at = 0
        self.ballast = ""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.at * stride < self.size:
            number = first + self.at * stride
            self.at += 1
            yield number, torch.rand(1), random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.tensor([self.at]), "ballast": self.ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["seen"]) == state["at"]
        self.at = state["at"]

    def set_rank(self, rank: int) -> None:
        """Every rank reads the same."""


class Reader:
    """An iterator that can be put anywhere."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.at = 0

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return self.at, torch.rand(1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Readers(IterableDataset[Any]):
    """A stream without a state, whose iterators have one."""

    def __iter__(self) -> Iterator[Any]:
        return Reader(11)


class Own:
    """A loader of somebody's own, which fetches ahead and says what it has handed out."""

    def __init__(self, size: int = 7) -> None:
        self.size = size
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        ahead: list[Any] = []
        numbers = iter(range(self.given, self.size))
        while True:
            ahead += itertools.islice(numbers, 3 - len(ahead))
            if not ahead:
                self.given = 0
                return
            self.given += 1
            yield ahead.pop(0), torch.rand(1)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


Make = Callable[[], Any]
LOADERS: dict[str, Make] = {
    "dataset": lambda: DataLoader(Cursor(), batch_size=3),
    "dataset, drop last": lambda: DataLoader(Cursor(), batch_size=3, drop_last=True),
    "dataset, no batching": lambda: DataLoader(Cursor(7), batch_size=None),
    "dataset, workers": lambda: DataLoader(Cursor(), batch_size=3, num_workers=2),
    "dataset, three workers": lambda: DataLoader(
        Cursor(19), batch_size=3, num_workers=3, prefetch_factor=4
    ),
    "iterator": lambda: DataLoader(Readers(), batch_size=2),
    "iterator, workers": lambda: DataLoader(Readers(), batch_size=2, num_workers=2),
    "loader": Own,
}


def plain(batch: Any) -> Any:
    """A batch as values that can be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


@contextlib.contextmanager
def batches(loader: Any, *, rank: int = 0) -> Iterator[Batches]:
    made = Batches(loader, seed=SEED, rank=rank)
    try:
        yield made
    finally:
        made.close()
        gc.collect()


def undisturbed(make: Make, count: int) -> tuple[list[Position], list[Any]]:
    torch.manual_seed(77)
    with batches(make()) as source:
        positions, values = [source.position()], []
        for _ in range(count):
            values.append(plain(source.next()))
            positions.append(source.position())
    return positions, values


@pytest.mark.parametrize("name", LOADERS)
def test_a_fresh_loader_goes_on_from_any_position(name: str) -> None:
    positions, values = undisturbed(LOADERS[name], 16)
    assert positions[-1].pass_ >= 1
    first_of_two = next(i for i, position in enumerate(positions) if position.pass_)

    for at in (2, first_of_two - 1, first_of_two):
        torch.manual_seed(123)
        with batches(LOADERS[name]()) as joiner:
            joiner.next()
            joiner.next()
            joiner.seek(positions[at])
            assert [plain(joiner.next()) for _ in range(3)] == values[at : at + 3]
            assert joiner.position() == positions[at + 3]


@pytest.mark.parametrize("name", LOADERS)
def test_the_same_loader_goes_back(name: str) -> None:
    positions, values = undisturbed(LOADERS[name], 10)

    torch.manual_seed(77)
    with batches(LOADERS[name]()) as source:
        for at in (4, 0):
            for _ in range(5):
                source.next()
            source.seek(positions[at])
            assert [plain(source.next()) for _ in range(2)] == values[at : at + 2]


@pytest.mark.parametrize("name", ["dataset", "loader"])
def test_a_position_counts_what_was_handed_out_and_not_what_was_fetched(name: str) -> None:
    with batches(LOADERS[name]()) as source:
        source.next()
        once = source.position()
        source.next()
        assert source.position() != once
        source.seek(once)
        source.next()
    assert source.placing is Placing.STATE
    assert source.exact


def test_how_a_loader_is_placed_is_known_when_the_loop_begins() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    for loader, placing in (
        (DataLoader(range(3)), Placing.NUMBER),  # type: ignore[arg-type]
        (DataLoader(Stream()), Placing.REPLAY),
        ([1, 2], Placing.REPLAY),
        (DataLoader(Readers()), Placing.STATE),
    ):
        with batches(loader) as source:
            assert source.placing is placing


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_that_holds_the_data_is_refused_by_its_largest_part(workers: int) -> None:
    dataset = Cursor()
    loader = DataLoader(dataset, batch_size=3, num_workers=workers)
    with batches(loader) as source:
        dataset.ballast = "x" * (LIMIT_BYTES + 1)
        with pytest.raises(StateError, match=r"the state of `Cursor` is 1\.0 MiB, of which the"):
            source.next()


def test_a_state_with_something_else_than_values_is_refused_by_its_path() -> None:
    with pytest.raises(StateError, match=r"the state\['file'\] is a set"):
        pack({"file": {1}}, "the state")


def test_a_damaged_state_is_refused() -> None:
    for data in (b"", b"rubbish", pack({"at": 1}, "it")[:-1]):
        with pytest.raises(StateError, match="cannot be read"):
            unpack(data)
    with batches(DataLoader(Cursor())) as source:
        source.seek(Position(0, 1, 0, b"rubbish"))
        with pytest.raises(StateError, match="where the loader stands cannot be read"):
            source.next()


def test_a_position_of_another_number_of_workers_is_refused() -> None:
    positions, _ = undisturbed(LOADERS["dataset, three workers"], 3)
    with batches(DataLoader(Cursor(19), batch_size=3, num_workers=1)) as source:
        source.seek(positions[3])
        with pytest.raises(StateError, match="another number of workers than 1"):
            source.next()


def test_an_error_loses_no_batch_of_a_loader_with_a_state() -> None:
    class Failing(Own):
        broken = True

        def state_dict(self) -> dict[str, Any]:
            if self.broken and self.given == 3:
                msg = "out of order"
                raise ValueError(msg)
            return super().state_dict()

    loader = Failing()
    with batches(loader) as source:
        assert [source.next()[0] for _ in range(2)] == [0, 1]
        with pytest.raises(ValueError, match="out of order"):
            source.next()
        loader.broken = False
        assert [source.next()[0] for _ in range(2)] == [2, 3]


class Resumable(Sampler[int]):
    """A sampler with a cursor, and a state that says where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        while self.at < 8:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_sampler_with_a_state_begins_every_pass_as_the_first() -> None:
    with batches(DataLoader(range(8), sampler=Resumable(), batch_size=2)) as source:  # type: ignore[arg-type]
        source.require_movable(slots=1)
        values = [plain(source.next()) for _ in range(6)]
        source.seek(Position(0, 2, 0))
        assert [plain(source.next()) for _ in range(3)] == values[2:5]


def test_a_sampler_with_a_cursor_and_no_state_is_refused_by_its_name() -> None:
    class Forgetful(Resumable):
        state_dict = None  # type: ignore[assignment]

    with (
        batches(DataLoader(range(8), sampler=Forgetful(), batch_size=2)) as source,  # type: ignore[arg-type]
        pytest.raises(ConfigError, match="`Forgetful` yields other samples when a pass is begun"),
    ):
        source.require_movable(slots=1)


def test_numbered_samples_with_a_state_are_refused() -> None:
    class Memory(list[int]):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            """Nothing to load."""

    with (
        batches(DataLoader(Memory([1, 2]))) as source,  # type: ignore[arg-type]
        pytest.raises(ConfigError, match="`Memory` has numbered samples and a state as well"),
    ):
        source.require_movable(slots=1)


class Counted(Dataset[Any]):
    """Samples that are numbered by how many were read before."""

    def __init__(self, *, told: bool) -> None:
        self.told = told
        self.read = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return index, torch.rand(1), self.read if self.told else 0


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_depend_on_what_was_read_before_are_refused_at_the_first(
    workers: int,
) -> None:
    with batches(DataLoader(Counted(told=True), batch_size=2, num_workers=workers)) as source:
        source.mistrust()
        with pytest.raises(ConfigError, match="what `Counted` returns for a sample depends on"):
            source.next()


def test_a_dataset_may_count_what_does_not_show() -> None:
    dataset = Counted(told=False)
    with batches(DataLoader(dataset, batch_size=2)) as source:
        source.mistrust()
        for _ in range(3):
            source.next()
    assert dataset.read == 8  # the first batch twice


def test_samples_are_fetched_once_unless_they_are_mistrusted() -> None:
    dataset = Counted(told=True)
    with batches(DataLoader(dataset, batch_size=2)) as source:
        assert [plain(source.next())[2] for _ in range(2)] == [[1, 2], [3, 4]]
