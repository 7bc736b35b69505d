from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import pathlib
import random
import select
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tmover.errors import ConfigError, StateError
from tmover.state import rng
from tmover.state.loader import Batches, Position

SEED = 5


class Augmented(Dataset[Any]):
    """Samples with random noise from every stream."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "noise": torch.rand(2),
            "python": random.random(),
            "numpy": np.random.rand(2),
        }


class Counting(IterableDataset[Any]):
    """A stream of numbers, split among loader workers."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.size, stride):
            yield number, torch.rand(1), random.random()


def mixed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate with some randomness of its own."""
    batch: dict[str, Any] = torch.utils.data.default_collate(samples)
    batch["mix"] = torch.rand(1)
    return batch


class Shuffled(Sampler[int]):
    """A sampler that uses global streams for every index, and counts passes itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.passes: list[int] = []

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        self.passes.append(epoch)

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.size))
        while left:
            yield left.pop(random.randrange(len(left)) if torch.rand(()) < 0.5 else 0)


Make = Callable[[int], Any]
"""Makes a loader with that many workers."""

MAP_STYLE: dict[str, Make] = {
    "sequential": lambda w: DataLoader(Augmented(), batch_size=4, num_workers=w),
    "shuffled": lambda w: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=w),
    "drop last": lambda w: DataLoader(
        Augmented(), batch_size=4, shuffle=True, drop_last=True, num_workers=w
    ),
    "distributed": lambda w: DataLoader(
        Augmented(),
        batch_size=4,
        sampler=DistributedSampler(Augmented(), num_replicas=2, rank=0),
        num_workers=w,
    ),
    "batch sampler": lambda w: DataLoader(
        Augmented(),
        batch_sampler=BatchSampler(RandomSampler(range(23)), 5, drop_last=False),
        num_workers=w,
    ),
    "no batching": lambda w: DataLoader(Augmented(7), batch_size=None, shuffle=True, num_workers=w),
    "own sampler": lambda w: DataLoader(
        Augmented(), batch_size=4, sampler=Shuffled(23), num_workers=w
    ),
    "weighted": lambda w: DataLoader(
        Augmented(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 23, 13), num_workers=w
    ),
    "subset": lambda w: DataLoader(
        Augmented(), batch_size=4, sampler=SubsetRandomSampler(range(3, 20)), num_workers=w
    ),
    "generator": lambda w: DataLoader(
        Augmented(),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(8),
        num_workers=w,
    ),
    "collated": lambda w: DataLoader(
        Augmented(), batch_size=4, shuffle=True, collate_fn=mixed, num_workers=w
    ),
    "pinned": lambda w: DataLoader(Augmented(), batch_size=4, pin_memory=True, num_workers=w),
}
STREAMS: dict[str, Make] = {
    "iterable": lambda w: DataLoader(Counting(), batch_size=4, num_workers=w),
    "iterable, drop last": lambda w: DataLoader(
        Counting(), batch_size=4, drop_last=True, num_workers=w
    ),
    "iterable, no batching": lambda w: DataLoader(Counting(7), batch_size=None, num_workers=w),
}


class Fresh:
    """A plain iterable that begins anew, with randomness."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(5):
            yield number, torch.rand(1), random.random(), np.random.rand()


PLAIN: dict[str, Make] = {
    "list": lambda w: [torch.full((2,), i) for i in range(5)],
    "object": lambda w: Fresh(),
}
ALL = {**MAP_STYLE, **STREAMS, **PLAIN}
POOLED = ["shuffled", "distributed", "no batching", "own sampler", "iterable"]
"""What is tried with loader workers too; each pool costs a part of a second."""
CASES = [(name, 0) for name in ALL] + [(name, 2) for name in POOLED]


def mark(batch: Any) -> str:
    """A hash of every bit of a batch."""
    if isinstance(batch, torch.Tensor):
        return hashlib.sha256(str(batch.dtype).encode() + bytes(batch.numpy())).hexdigest()
    if isinstance(batch, np.ndarray):
        return hashlib.sha256(batch.tobytes()).hexdigest()
    if isinstance(batch, dict):
        return json.dumps({k: mark(v) for k, v in batch.items()})
    if isinstance(batch, (list, tuple)):
        return json.dumps([mark(v) for v in batch])
    return repr(batch)


def make(name: str, workers: int) -> Any:
    torch.manual_seed(77)
    return ALL[name](workers)


@contextlib.contextmanager
def batches(loader: Any, *, rank: int = 0) -> Iterator[Batches]:
    made = Batches(loader, seed=SEED, rank=rank)
    try:
        yield made
    finally:
        made.close()
        gc.collect()  # tracebacks of errors hold on to torch's loaders


def undisturbed(name: str, workers: int, count: int) -> tuple[list[Position], list[str]]:
    positions, marks = [], []
    with batches(make(name, workers)) as source:
        for _ in range(count):
            positions.append(source.position())
            marks.append(mark(source.next()))
    return positions, marks


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_from_any_position_the_rest_is_the_undisturbed_rest(name: str, workers: int) -> None:
    positions, marks = undisturbed(name, workers, 14)
    assert positions[-1].pass_ >= 1
    assert len(set(marks)) == 14 or name == "list"

    with batches(make(name, workers)) as source:
        for at in (9, 2) if name in STREAMS and workers else (9, 2, 0, 13, 5):
            source.next()
            source.seek(positions[at])
            assert source.position() == positions[at]
            rest = [mark(source.next()) for _ in range(min(4, 14 - at))]
            assert rest == marks[at : at + 4]


@pytest.mark.parametrize("name", ["batch sampler", "generator", "collated", "pinned"])
def test_batches_do_not_depend_on_the_number_of_workers(name: str) -> None:
    alone, pool = undisturbed(name, 0, 8), undisturbed(name, 2, 8)

    assert alone == pool


@pytest.mark.parametrize("workers", [0, 2])
def test_another_process_goes_on_from_a_position(workers: int) -> None:
    positions, marks = undisturbed("collated", workers, 12)

    def join(line: Connection) -> None:
        torch.manual_seed(123456)  # another rank's script may seed otherwise
        loader = MAP_STYLE["collated"](workers)
        loader.set_rank = int  # says that every rank reads the same
        with batches(loader, rank=1) as source:
            source.next()
            source.seek(positions[7], rank=0)
            line.send([mark(source.next()) for _ in range(5)])

    with another_process(join) as (_, line):
        assert line.poll(60)
        assert line.recv() == marks[7:12]


@contextlib.contextmanager
def another_process(work: Callable[[Connection], None]) -> Iterator[tuple[int, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
    process.start()
    try:
        assert process.pid is not None
        yield process.pid, ours
        process.join(30)
        assert not process.is_alive()
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()


@pytest.mark.parametrize(
    ("name", "workers"), [(n, w) for n, w in CASES if not w or n in ("shuffled", "iterable")]
)
def test_the_processes_own_streams_are_never_touched(name: str, workers: int) -> None:
    loader = make(name, workers)
    before = rng.capture()

    with batches(loader) as source:
        for _ in range(7):
            source.next()
        source.seek(Position(0, 1, 3))
        source.next()

    assert rng.capture() == before


@pytest.mark.parametrize(("name", "workers"), [("shuffled", 0), ("shuffled", 2), ("object", 0)])
def test_batches_do_not_depend_on_the_processes_own_streams(name: str, workers: int) -> None:
    _, marks = undisturbed(name, workers, 8)

    with batches(make(name, workers)) as source:
        for expected in marks:
            torch.rand(3)
            random.random()
            np.random.rand()
            assert mark(source.next()) == expected


def test_the_same_sample_is_augmented_anew_in_every_pass() -> None:
    with batches(make("sequential", 0)) as source:
        passes = [[source.next() for _ in range(6)] for _ in range(2)]

    assert [b["index"].tolist() for b in passes[0]] == [b["index"].tolist() for b in passes[1]]
    assert mark(passes[0]) != mark(passes[1])


def test_ranks_augment_differently_and_share_the_order_their_scripts_share() -> None:
    seen = []
    for rank in (0, 1):
        with batches(make("shuffled", 0), rank=rank) as source:
            seen.append(source.next())

    assert seen[0]["index"].tolist() == seen[1]["index"].tolist()
    assert mark(seen[0]) != mark(seen[1])


def test_ranks_whose_scripts_seed_differently_have_orders_of_their_own() -> None:
    orders = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        with batches(MAP_STYLE["shuffled"](0)) as source:
            orders.append(source.next()["index"].tolist())

    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


@pytest.mark.parametrize("name", ["shuffled", "object"])
def test_another_job_seed_is_another_sequence(name: str) -> None:
    marks = []
    for seed in (1, 2, 1):
        source = Batches(make(name, 0), seed=seed, rank=0)
        batch = source.next()
        marks.append((source.samples(), mark(batch)))

    assert marks[0] != marks[1]
    assert marks[0] == marks[2]
    assert name == "object" or marks[0][0] != marks[1][0]


def test_a_generator_the_script_seeds_decides_the_order() -> None:
    orders = []
    for seed, torch_seed in ((1, 1), (2, 1), (1, 2)):
        torch.manual_seed(torch_seed)
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(Augmented(), batch_size=4, shuffle=True, generator=generator)
        with batches(loader) as source:
            orders.append(source.next()["index"].tolist())

    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


def test_a_distributed_sampler_gives_every_sample_to_exactly_one_rank() -> None:
    used: list[int] = []
    for rank in range(2):
        torch.manual_seed(rank)
        sampler: DistributedSampler[Any] = DistributedSampler(
            Augmented(24), num_replicas=2, rank=rank
        )
        with batches(DataLoader(Augmented(24), batch_size=4, sampler=sampler), rank=rank) as source:
            used += [i for _ in range(3) for i in source.next()["index"].tolist()]

    assert sorted(used) == list(range(24))


def test_a_position_says_among_how_many_the_samples_are_divided() -> None:
    with batches(make("distributed", 0)) as source:
        length = source.length()
        for _ in range(length + 1):
            assert source.position().shares == 2
            source.next()
        assert source.position().pass_ == 1
    with batches(DataLoader(Augmented(), batch_size=4)) as source:
        assert source.position().shares == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_distributed_sampler_is_rebound_in_place(workers: int) -> None:
    def loader(rank: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            Augmented(), num_replicas=2, rank=rank
        )
        return DataLoader(Augmented(), batch_size=3, sampler=sampler, num_workers=workers)

    with batches(loader(0)) as source:
        positions = []
        for _ in range(9):
            positions.append(source.position())
            source.next()
        source.seek(positions[6])
        expected = [mark(source.next()) for _ in range(3)]

    joiner = loader(1)
    sampler = joiner.sampler
    with batches(joiner, rank=1) as source:
        source.next()
        source.rebind(0)
        assert joiner.sampler is sampler
        assert sampler.rank == 0  # type: ignore[attr-defined]
        source.next()
        source.seek(positions[6])
        assert [mark(source.next()) for _ in range(3)] == expected


def test_rebinding_takes_effect_at_the_next_batch() -> None:
    with batches(make("distributed", 0)) as source:
        source.next()
        second = source.next()
    loader = DataLoader(
        Augmented(),
        batch_size=4,
        sampler=DistributedSampler(Augmented(), num_replicas=2, rank=1),
        num_workers=2,
    )

    with batches(loader, rank=1) as source:
        source.next()
        source.rebind(0)
        assert mark(source.next()) == mark(second)


def test_a_sampler_that_splits_for_another_rank_than_the_global_one_is_not_rebound() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Augmented(), num_replicas=2, rank=1)

    with batches(DataLoader(Augmented(), sampler=sampler), rank=3) as source:
        source.rebind(3)
        with pytest.raises(StateError, match="splits for rank 1, not for the global rank 3"):
            source.rebind(2)


class Shard(IterableDataset[int]):
    """A stream that was built for its rank."""

    def __init__(self, mine: int) -> None:
        self.mine = mine

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.mine, 24, 3))


class ToldShard(Shard):
    """A stream that can be told another rank."""

    def set_rank(self, rank: int) -> None:
        self.mine = rank


class RankedShard(Dataset[int]):
    """A map-style dataset of one rank's samples."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.rank + 3 * index


class FixedShard(RankedShard):
    @property
    def rank(self) -> int:
        return 2

    @rank.setter
    def rank(self, rank: int) -> None:
        if rank != 2 or hasattr(self, "made"):
            raise AttributeError
        self.made = True


class Lists(list[int]):
    """Batches that are the same on every rank, and say so."""

    def set_rank(self, rank: int) -> None:
        """Nothing depends on it."""


def part_of(rank: int) -> Subset[Any]:
    return Subset(Augmented(24), range(rank, 24, 3))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Shard(2)), "over `Shard`, does not say how it depends on the rank"),
        (DataLoader(part_of(2), shuffle=True), "over `Subset`, does not say how it depends"),
        ([1, 2, 3], "the loader, a `list`, does not say how it depends on the rank"),
        (DataLoader(FixedShard(2)), "the attribute `rank` of `FixedShard` cannot be set"),
        (DataLoader(RankedShard(1)), "splits for rank 1, not for the global rank 2"),
    ],
    ids=["stream", "subset", "list", "fixed", "another rank"],
)
def test_what_may_depend_on_the_rank_and_cannot_be_told_is_refused_not_read(
    loader: Any, reason: str
) -> None:
    with batches(loader, rank=2) as source:
        source.next()
        with pytest.raises(ConfigError, match=reason):
            source.require_movable(slots=3)
        with pytest.raises(StateError, match=f"cannot become rank 0: .*{reason}"):
            source.rebind(0)
        source.require_movable(slots=1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [ToldShard, RankedShard])
def test_a_dataset_that_can_be_told_its_rank_yields_the_samples_of_the_new_one(
    kind: Callable[[int], Dataset[int]], workers: int
) -> None:
    def loader(rank: int) -> DataLoader[int]:
        return DataLoader(kind(rank), batch_size=2, num_workers=workers)

    with batches(loader(0)) as source:
        expected = [source.next().tolist() for _ in range(4)]
        after_two = Position(0, 2, source.position().seed)

    with batches(loader(2), rank=2) as joiner:
        joiner.require_movable(slots=3)
        joiner.next()
        joiner.rebind(0)
        joiner.seek(after_two)
        assert [joiner.next().tolist() for _ in range(2)] == expected[2:]


def test_a_stream_told_its_rank_where_it_stands_begins_anew() -> None:
    with batches(DataLoader(ToldShard(2)), rank=2) as source:
        source.next()
        source.rebind(0)
        assert source.next().tolist() == [3]


def test_batches_that_are_the_same_everywhere_can_say_so() -> None:
    with batches(Lists([5, 6, 7]), rank=2) as source:
        source.require_movable(slots=3)
        source.next()
        source.rebind(0)
        assert source.next() == 6


class Drawing(Dataset[int]):
    """A dataset with a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.draws = generator

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Privately(Sampler[int]):
    """A sampler that draws its order from a generator under another name."""

    def __init__(self, generator: Any) -> None:
        self.draws = generator

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=self.draws).tolist())

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    "generator",
    [np.random.default_rng(1), np.random.RandomState(1), random.Random(1), torch.Generator()],
    ids=["numpy", "numpy's old one", "python", "torch"],
)
def test_a_generator_that_only_this_process_holds_is_refused_by_its_path(generator: Any) -> None:
    with (
        batches(DataLoader(Drawing(generator))) as source,
        pytest.raises(ConfigError, match=r"`Drawing\.draws` is a random generator of its own"),
    ):
        source.require_movable(slots=1)


def test_a_samplers_foreign_generator_is_refused_by_its_path() -> None:
    sampler = Privately(np.random.default_rng(1))
    with (
        batches(DataLoader(Augmented(8), sampler=sampler)) as source,
        pytest.raises(ConfigError, match=r"`Privately\.draws` is a random generator of its own"),
    ):
        source.require_movable(slots=1)


def test_a_samplers_torch_generator_is_taken_over_whatever_its_name() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Augmented(8), sampler=Privately(torch.Generator().manual_seed(3)))

    with batches(loader()) as source:
        marks = [mark(source.next()) for _ in range(24)]
        position = Position(2, 0, source.position().seed)
    with batches(loader()) as joiner:
        joiner.require_movable(slots=1)
        joiner.seek(position)
        assert [mark(joiner.next()) for _ in range(8)] == marks[16:]


def test_an_iterator_is_refused_when_the_loop_begins() -> None:
    with (
        batches(iter([1, 2])) as source,
        pytest.raises(ConfigError, match="can be gone through only once"),
    ):
        source.require_movable(slots=1)


def test_samples_are_named_by_the_indices_of_the_last_batch() -> None:
    with batches(make("shuffled", 2)) as source:
        assert source.samples() is None
        for _ in range(3):
            assert source.next()["index"].tolist() == source.samples()
    with batches(make("no batching", 0)) as source:
        assert [source.next()["index"]] == source.samples()
    with batches(make("iterable", 0)) as source:
        source.next()
        assert source.samples() is None
    several = BatchSampler(torch.arange(6), 3, drop_last=False)
    with batches(DataLoader(Bulk(), batch_size=None, sampler=several)) as source:
        assert source.next() == [0, 10, 20]
        assert json.dumps(source.samples()) == "[0, 1, 2]"


class Bulk(Dataset[Any]):
    """Fetches several samples at once."""

    def __getitem__(self, indices: list[int]) -> list[int]:
        return [int(i) * 10 for i in indices]

    def __len__(self) -> int:
        return 6


class Together(Augmented):
    """Has torch's hook for fetching a batch's samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"index": i, "together": True} for i in indices]


def test_a_dataset_that_fetches_a_batch_at_once_does_so() -> None:
    with batches(DataLoader(Together(), batch_size=3)) as source:
        assert source.next()["together"].all()


def test_passes_are_announced_to_samplers() -> None:
    sampler = Shuffled(8)
    with batches(DataLoader(Augmented(8), batch_size=4, sampler=sampler)) as source:
        for _ in range(5):
            source.next()

    assert sampler.passes == [0, 1, 2]


class Announced:
    """A plain iterable whose content depends on the pass, as shuffled streams do."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from [(self.epoch, number) for number in range(2)]


def test_passes_are_announced_to_streams() -> None:
    with batches(Announced()) as source:
        assert [source.next() for _ in range(3)] == [(0, 0), (0, 1), (1, 0)]
        source.seek(Position(5, 1, 0))
        assert source.next() == (5, 1)


def test_drop_last_and_the_last_short_batch_are_as_in_torch() -> None:
    for name, sizes in (("shuffled", [4, 4, 4, 4, 4, 3]), ("drop last", [4, 4, 4, 4, 4])):
        loader = make(name, 0)
        with batches(loader) as source:
            assert source.length() == len(loader) == len(sizes)
            assert [len(source.next()["index"]) for _ in sizes] == sizes
            assert source.position().pass_ == 0
            source.next()
            assert source.position() == Position(1, 1, source.position().seed)


def test_a_position_past_the_end_of_a_pass_is_the_first_of_the_next() -> None:
    for name in ("shuffled", "iterable"):
        _, marks = undisturbed(name, 0, 8)
        with batches(make(name, 0)) as source:
            seed = source.position().seed
            source.seek(Position(0, 6, seed))
            assert mark(source.next()) == marks[6]


def test_worker_processes_stay_alive_over_passes_and_seeks() -> None:
    with batches(DataLoader(Pids(), batch_size=1, num_workers=2)) as source:
        pids = set()
        for turn in range(4):
            pids |= {int(source.next()) for _ in range(5)}
            source.seek(Position(turn, turn, 0))

        assert len(pids) == 2
        assert os.getpid() not in pids


class Pids(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Slow(Dataset[int]):
    """Samples above 0 wait for a file; what was fetched is noted."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        (self.folder / f"fetched{index}").touch()
        return index


def test_what_was_asked_for_before_a_seek_is_not_fetched(tmp_path: pathlib.Path) -> None:
    """Loader workers skip what nobody waits for any more, except what they have in hand."""
    loader = DataLoader(Slow(tmp_path), batch_size=1, num_workers=1, prefetch_factor=16)
    with batches(loader) as source:
        source.next()
        worker = worker_of(source)
        os.kill(worker, signal.SIGSTOP)
        os.waitid(os.P_PID, worker, os.WSTOPPED)
        already = len(list(tmp_path.iterdir()))
        source.seek(Position(0, 40, source.position().seed))
        os.kill(worker, signal.SIGCONT)

        assert int(source.next()) == 40
        beyond = [p for p in tmp_path.iterdir() if int(p.name.removeprefix("fetched")) < 40]
        assert len(beyond) <= already + 1


def worker_of(source: Batches) -> int:
    (worker,) = source._source._iterator._workers  # type: ignore[attr-defined]
    pid = worker.pid
    assert isinstance(pid, int)
    return pid


def test_workers_start_as_the_user_says_and_see_the_users_dataset() -> None:
    loader = DataLoader(Told(), batch_size=None, num_workers=1, worker_init_fn=tell)

    with batches(loader) as source:
        assert source.next() == "told by 0"


class Told(Dataset[str]):
    word = "not told"

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return self.word


def tell(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Told)
    info.dataset.word = f"told by {worker}"


def test_loader_workers_end_with_the_rank() -> None:
    def rank(line: Connection) -> None:
        source = Batches(DataLoader(Pids(), batch_size=1, num_workers=2), seed=0, rank=0)
        line.send(sorted({int(source.next()) for _ in range(4)}))
        line.poll(60)

    with another_process(rank) as (pid, line):
        assert line.poll(60)
        workers = [os.pidfd_open(worker) for worker in line.recv()]
        os.kill(pid, signal.SIGKILL)

        for worker in workers:
            ended, _, _ = select.select([worker], [], [], 2)  # torch's own watch takes 5 s
            os.close(worker)
            assert ended


def test_an_untouched_batch_is_given_again_as_it_is() -> None:
    with batches(make("shuffled", 0)) as source:
        batch = source.next()

        assert source.again() is batch
        assert source.again() is batch


def pop(batch: Any) -> None:
    batch.pop("noise")


def write_tensor(batch: Any) -> None:
    batch["noise"].mul_(2)


def write_array(batch: Any) -> None:
    batch["numpy"] = batch["numpy"] * 2


def replace(batch: Any) -> None:
    batch["noise"] = batch["noise"] + 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change", [pop, write_tensor, write_array, replace])
def test_a_batch_that_was_changed_is_fetched_again(
    change: Callable[[Any], None], workers: int
) -> None:
    positions, marks = undisturbed("shuffled", workers, 8)
    with batches(make("shuffled", workers)) as source:
        for _ in range(5):
            batch = source.next()

        for _ in range(2):
            change(batch)
            batch = source.again()
            assert mark(batch) == marks[4]

        assert source.position() == positions[5]
        assert [mark(source.next()) for _ in range(3)] == marks[5:]


def test_a_changed_batch_of_a_stream_is_fetched_again() -> None:
    _, marks = undisturbed("iterable", 0, 8)
    with batches(make("iterable", 0)) as source:
        for _ in range(3):
            batch = source.next()
        batch[1].zero_()

        assert mark(source.again()) == marks[2]
        assert mark(source.next()) == marks[3]


def test_before_the_first_batch_there_is_none_to_give_again() -> None:
    with batches(make("list", 0)) as source, pytest.raises(StateError, match="no batch"):
        source.again()


class Failing(Dataset[int]):
    def __init__(self) -> None:
        self.broken = True

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 2 and self.broken:
            msg = "cannot read sample 2"
            raise ValueError(msg)
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_is_the_users_to_see_and_loses_no_batch(workers: int) -> None:
    dataset = Failing()
    with batches(DataLoader(dataset, batch_size=1, num_workers=workers)) as source:
        assert [int(source.next()), int(source.next())] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot read sample 2"):
                source.next()

        dataset.broken = False
        assert [int(source.next()), int(source.next())] == [2, 3]


def test_after_close_it_goes_on() -> None:
    _, marks = undisturbed("shuffled", 2, 5)
    with batches(make("shuffled", 2)) as source:
        for _ in range(3):
            source.next()
        source.close()

        assert [mark(source.next()) for _ in range(2)] == marks[3:]


def test_a_loader_without_a_length_needs_a_total() -> None:
    for loader in (Fresh(), DataLoader(Counting(), batch_size=4)):
        with (
            batches(loader) as source,
            pytest.raises(
                ConfigError, match=r"say how many steps there are, `steps\(loader, total"
            ),
        ):
            source.length()


@pytest.mark.parametrize("loader", [[], DataLoader(Augmented(3), batch_size=4, drop_last=True)])
def test_an_empty_loader_is_refused(loader: Any) -> None:
    with batches(loader) as source, pytest.raises(ConfigError, match="is empty"):
        source.next()


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(ConfigError, match="`int`, which cannot be iterated"):
        Batches(3, seed=0, rank=0)  # type: ignore[arg-type]


def test_an_iterator_serves_one_pass_and_no_seek() -> None:
    with batches(iter([1, 2, 3])) as source:
        assert not source.restartable
        assert [source.next() for _ in range(3)] == [1, 2, 3]
        with pytest.raises(ConfigError, match="gone through only once"):
            source.next()
        with pytest.raises(ConfigError, match="gone through only once"):
            source.seek(Position(0, 1, 0))


def test_a_seek_of_a_stream_is_not_exact_and_of_numbered_samples_it_is() -> None:
    for name, exact in (("shuffled", True), ("iterable", False), ("list", False)):
        with batches(make(name, 0)) as source:
            assert source.exact is exact
            assert source.restartable


class OwnLoader(DataLoader[Any]):
    """A loader whose iteration is not torch's is gone through as it is."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield {"wrapped": batch}


def test_a_loader_with_an_iteration_of_its_own_keeps_it() -> None:
    with batches(OwnLoader(Augmented(8), batch_size=4, shuffle=True)) as source:
        marks = [mark(source.next()) for _ in range(4)]
        source.seek(Position(1, 0, source.position().seed))
        batch = source.next()

    assert mark(batch) == marks[2]
    assert list(batch) == ["wrapped"]
