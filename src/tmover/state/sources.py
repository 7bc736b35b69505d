"""Where batches come from: a dataset with numbered samples, or anything that can be gone through.

An `IndexedSource` goes to any position by sending other indices to the same loader workers. What
has a state of its own is placed by that (see `stateful`). A `StreamSource` has to fetch everything
before the position again and drop it.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from tmover.core.events import Placing
from tmover.errors import ConfigError, StateError
from tmover.state import rng
from tmover.state.drift import Drift
from tmover.state.fetching import SeededDataset, Ticket, Varies, same
from tmover.state.packed import is_stateful
from tmover.state.position import Fetched, Position, advance, next_pass
from tmover.state.ranked import Ranked
from tmover.state.rebuilding import end, is_torchs, rebuilt
from tmover.state.sampling import Order
from tmover.state.stateful import (
    EMPTY,
    OpaqueSource,
    ShardedSource,
    Unnumbered,
    announce_pass,
    says_where_it_stands,
)

ONCE = (
    "the loader is an iterator that can be gone through only once; give `steps` a DataLoader, a "
    "list, or an object whose __iter__ begins anew"
)


_VARIES = (
    "what `{}` returns for a sample depends on more than its number and the random streams: "
    "fetched twice from the same seeds, a batch had other bits, so no joiner could have the same; "
    "it may count what it reads, look at the clock or draw from elsewhere (`tmover check-loader`)"
)


class Source(Protocol):
    """Batches from a position on."""

    begin: Position
    """Where the first batch is, with the seed of this rank's order, as the script left it."""
    restartable: bool
    """Whether it can go to a position other than the one it is at."""
    exact: bool
    """Whether it goes there without fetching everything before it."""
    placing: Placing
    """How it goes there."""
    drift: Drift
    """What it has seen its dataset change of itself."""

    def mistrust(self) -> None:
        """See, where that can be seen, that what is fetched again is the same."""

    def flaw(self) -> str:
        """Return why no process could find a position again; nothing if it seems possible."""

    def obstacle(self) -> str:
        """Return why this rank could not be taken over by a standby; nothing if it could."""

    def order(self, most: int) -> list[int] | None:
        """Return the numbers of the first pass's samples; None if they have none."""

    def start(self, position: Position, rank: int) -> None:
        """Let the next batch be the one at `position`, as `rank` would see it."""

    def next(self) -> Fetched:
        """Return the next batch."""

    def close(self) -> None:
        """End loader workers."""


def source(loader: Iterable[Any], *, seed: int, rank: int) -> Source:
    """Return the source for what the user iterates."""
    if is_torchs(loader):
        if not isinstance(loader.dataset, IterableDataset):
            return IndexedSource(loader, seed=seed, rank=rank)
        if says_where_it_stands(loader.dataset):
            return ShardedSource(loader, seed=seed, rank=rank)
        return StreamSource(loader, seed=seed, rank=rank)
    if not hasattr(loader, "__iter__"):
        msg = f"the loader is a `{type(loader).__name__}`, which cannot be iterated"
        raise ConfigError(msg)
    if is_stateful(loader):
        return OpaqueSource(loader, seed=seed, rank=rank)
    return StreamSource(loader, seed=seed, rank=rank)


class IndexedSource:
    """A map-style `DataLoader`: its samplers here, its dataset in workers that stay alive."""

    restartable = True
    exact = True
    placing = Placing.NUMBER

    def __init__(self, loader: DataLoader[Any], *, seed: int, rank: int) -> None:
        self._loader = loader
        self._job_seed = seed
        self._rank = rank
        self._order = Order(loader, seed=seed)
        self._ranked = Ranked(loader, rank=rank)
        self.begin = Position(0, 0, self._order.seed, shares=self._ranked.shares)
        self._walk = self._order.walk(self.begin)
        self._issued: collections.deque[tuple[Ticket, Position]] = collections.deque()
        self._serial = 0
        self._wanted = 0
        self._shared: torch.Tensor | None = None
        """What workers see of `_wanted`."""
        self._iterator: Any = None
        self._twice = False
        self.drift = Drift(loader)

    def mistrust(self) -> None:
        """Have the first batch that each loader worker fetches fetched twice."""
        self._twice = self.drift.warns = True

    def flaw(self) -> str:
        """Return why the samples of a position are not known: its order, or its dataset, varies."""
        dataset = self._loader.dataset
        if is_stateful(dataset) and not isinstance(dataset, torch.nn.Module):
            return (
                f"`{type(dataset).__name__}` has numbered samples and a state as well: what a "
                "sample holds must depend on its number alone; make it an IterableDataset, which "
                "is placed by its state, or take `state_dict` away"
            )
        return self._order.flaw()

    def obstacle(self) -> str:
        """Return why a standby could not take this rank over."""
        return self._ranked.obstacle()

    def order(self, most: int) -> list[int] | None:
        """Return what the samplers yield in the first pass, if that is numbers."""
        numbers: list[int] = []
        for position, indices in itertools.islice(self._order.walk(self.begin), most):
            if position.pass_ > self.begin.pass_:
                break
            several = self._several(indices)
            if not all(hasattr(each, "__index__") for each in several):
                return None
            numbers += map(operator.index, several)
        return numbers

    def start(self, position: Position, rank: int) -> None:
        """Send other indices from here on; what was asked for before is dropped unfetched."""
        if self._ranked.rebind(rank):
            self.close()
        self._rank = rank
        self._walk = self._order.walk(position)
        self._wanted = self._serial
        if self._shared is not None:
            self._shared.fill_(self._wanted)

    def next(self) -> Fetched:
        """Return the next batch that is wanted."""
        if self._iterator is None:
            self._iterator = self._open()
        while True:
            serial, batch = next(self._iterator)
            ticket, position = self._issued.popleft()
            if ticket.serial != serial:
                msg = f"the loader returned batch {serial} where {ticket.serial} was due"
                raise StateError(msg)
            if isinstance(batch, Varies):
                raise ConfigError(_VARIES.format(batch.dataset))
            if serial >= self._wanted:
                return Fetched(batch, advance(position), self._several(ticket.indices))

    def _several(self, indices: Any) -> list[Any]:
        several = self._loader.batch_sampler is not None or isinstance(indices, (list, tuple))
        return list(indices) if several else [indices]

    def _tickets(self) -> Iterator[Ticket]:
        """Yield tickets without end. Torch's loader draws them ahead of time, for its workers."""
        while True:
            position, indices = next(self._walk)
            rank = self._ranked.data_rank
            seed = rng.derive("batch", self._job_seed, rank, position.pass_, position.batch)
            ticket = Ticket(self._serial, seed, indices)
            self._serial += 1
            self._issued.append((ticket, position))
            yield ticket

    def _open(self) -> Iterator[tuple[int, Any]]:
        mine = self._loader
        self._shared = torch.tensor(self._wanted)
        if mine.num_workers:
            self._shared.share_memory_()  # type: ignore[no-untyped-call]
        dataset = SeededDataset(
            mine.dataset, mine.collate_fn, self._shared, batched=mine.batch_sampler is not None
        )
        dataset.twice = self._twice
        if not mine.num_workers:
            dataset.reading = self.drift.reading
        return iter(rebuilt(mine, dataset, sampler=_Endless(self._tickets), collate_fn=same))

    def close(self) -> None:
        """End the workers; `start` must be called before `next` is called again."""
        end(self._iterator)
        self._iterator = self._shared = None
        self._issued.clear()


class _Endless:
    """A sampler over a generator function."""

    def __init__(self, generate: Any) -> None:
        self._generate = generate

    def __iter__(self) -> Iterator[Any]:
        return self._generate()  # type: ignore[no-any-return]


class StreamSource(Unnumbered):
    """An iterable dataset's loader, or any iterable: gone through from its beginning."""

    exact = False
    placing = Placing.REPLAY

    def __init__(self, loader: Iterable[Any], *, seed: int, rank: int) -> None:
        self._loader = loader
        self._rank = rank
        self._ranked = Ranked(loader, rank=rank)
        self._job_seed = seed
        self.begin = Position(0, 0, torch.initial_seed(), shares=self._ranked.shares)
        self.restartable = not isinstance(loader, Iterator)
        self._position = self.begin
        self._iterator: Any = None
        self._stream = rng.Stream(0)
        self._begun = False
        self.drift = Drift(loader)

    def start(self, position: Position, rank: int) -> None:
        """Go to `position` from the beginning of its pass; to where it is only for another rank."""
        there = position == self._position and (self._iterator is not None or not self._begun)
        if there and rank == self._rank:
            return
        self._refuse_restart()
        self._ranked.rebind(rank)
        self._rank = rank
        self.close()
        self._position = position

    def next(self) -> Fetched:
        """Return the next batch, from the next pass if this one is over."""
        for _ in range(2):
            if self._iterator is None:
                self._open()
            with self._stream.active(), self.drift.reading():
                batch = next(self._iterator, _END)
            if batch is not _END:
                self._position = advance(self._position)
                return Fetched(batch, self._position, None)
            self.close()
            self._position = next_pass(self._position)
        raise ConfigError(EMPTY)

    def _refuse_restart(self) -> None:
        if self._begun and not self.restartable:
            raise ConfigError(ONCE)

    def _open(self) -> None:
        """Begin the position's pass and go forward to its batch."""
        self._refuse_restart()
        self._begun = True
        seed = rng.derive("stream", self._job_seed, self._position.seed, self._position.pass_)
        self._stream = rng.Stream(seed)
        with self._stream.active():
            announce_pass(self._loader, self._position.pass_)
            with self.drift.reading():
                self._iterator = iter(self._seeded(seed))
            for _ in range(self._position.batch):
                if next(self._iterator, _END) is _END:
                    break

    def _seeded(self, seed: int) -> Iterable[Any]:
        """Return the loader itself, or one like it that seeds its workers from `seed`."""
        mine = self._loader
        if not is_torchs(mine):
            return mine
        loader = rebuilt(mine, mine.dataset, batch_size=mine.batch_size, drop_last=mine.drop_last)
        loader.generator.manual_seed(seed)
        return loader

    def close(self) -> None:
        """End the pass and its workers."""
        end(self._iterator)
        self._iterator = None


_END = object()
