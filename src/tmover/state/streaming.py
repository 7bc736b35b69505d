"""How a batch of a stream is fetched, where the stream says with each where it stands.

Every loader worker has a *shard* of the stream: what its copy of the dataset yields. Beside each
batch goes what the shard has said after it, so what workers have fetched ahead does not matter. A
shard opens where it is told to; batches come in turns, and whose turn it is is kept as well.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from torch.utils.data import IterableDataset, get_worker_info

from tmover.errors import StateError
from tmover.state import rng
from tmover.state.fetching import Wrapped
from tmover.state.packed import is_stateful, pack, unpack


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Where one worker's part of a stream stands."""

    batches: int
    """How many it has given in this pass."""
    dataset: bytes = b""
    """The dataset's state, packed; empty if it has none, or is its own iterator."""
    iterator: bytes = b""
    """The state of what iterates it, packed."""


class Sent(NamedTuple):
    """What comes out of a worker."""

    shard: int
    after: Shard | str
    """Where the shard stands now; in words why that cannot be said, if it cannot."""
    batch: Any


class ShardedStream(Wrapped, IterableDataset[Sent]):
    """Batches of an iterable dataset, each with where it leaves the shard it comes from."""

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[Any], Any],
        size: int | None,
        drop_last: bool,
        seed: int,
        shards: Mapping[int, Shard],
    ) -> None:
        """`size` is the number of samples in a batch; None if what is yielded is one already."""
        self.dataset = dataset
        self._collate = collate
        self._size = size
        self._drop_last = drop_last
        self._seed = seed
        self._shards = shards

    def __iter__(self) -> Iterator[Sent]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        shard = self._shards.get(number, Shard(0))
        with self._streams(number, "begin"):
            iterator = self._open(shard)
        for count in itertools.count(shard.batches):
            with self._streams(number, count):
                batch = self._fetch(iterator)
            if batch is _END:
                return
            yield Sent(number, self._standing(iterator, count + 1), batch)

    def _streams(self, number: int, what: int | str) -> contextlib.AbstractContextManager[None]:
        """Seed the random streams for one batch of a shard; in the rank's process, for its time."""
        seed = rng.derive("shard", self._seed, number, what)
        if get_worker_info() is None:
            return rng.isolated(seed)
        rng.seed(seed)
        return contextlib.nullcontext()

    def _open(self, shard: Shard) -> Iterator[Any]:
        if shard.dataset:
            self.dataset.load_state_dict(unpack(shard.dataset))
        iterator: Iterator[Any] = iter(self.dataset)
        if shard.iterator:
            if not is_stateful(iterator):
                msg = f"`{type(iterator).__name__}` has no state any more, where it had one before"
                raise StateError(msg)
            iterator.load_state_dict(unpack(shard.iterator))  # type: ignore[attr-defined]  # it has one
        return iterator

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        if self._size is None:
            sample = next(iterator, _END)
            return _END if sample is _END else self._collate(sample)
        samples = list(itertools.islice(iterator, self._size))
        if not samples or (len(samples) < self._size and self._drop_last):
            return _END
        return self._collate(samples)

    def _standing(self, iterator: Any, count: int) -> Shard | str:
        dataset = self.dataset
        try:
            mine = b""
            if iterator is not dataset and is_stateful(dataset):
                mine = pack(dataset.state_dict(), f"the state of `{type(dataset).__name__}`")
            its = b""
            if is_stateful(iterator):
                its = pack(iterator.state_dict(), f"the state of `{type(iterator).__name__}`")
        except StateError as error:
            return str(error)
        return Shard(count, mine, its)


_END = object()
