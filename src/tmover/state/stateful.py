"""Where batches come from that say themselves where they stand, and can be put there again.

A `ShardedSource` asks an iterable dataset, or what iterates it, in every loader worker; an
`OpaqueSource` a loader that is not torch's. What they say goes into the position, as of the batch
that was handed out. Where an iterable dataset has a state, each of its passes begins with the one
it had when the loop began; a loader that is not torch's goes on from what it says at a pass's end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader

from tmover.core.events import Placing
from tmover.errors import ConfigError, StateError
from tmover.state import rng
from tmover.state.drift import Drift
from tmover.state.fetching import same
from tmover.state.packed import LIMIT_BYTES, is_stateful, pack, unpack
from tmover.state.position import Fetched, Position, advance, next_pass
from tmover.state.ranked import Ranked
from tmover.state.rebuilding import end, rebuilt
from tmover.state.streaming import Shard, ShardedStream

EMPTY = "the loader is empty: it yields no batch"
_END: Any = object()


def says_where_it_stands(dataset: Any) -> bool:
    """Return whether an iterable dataset, or what iterates it, has a state."""
    if is_stateful(dataset):
        return True
    if inspect.isgeneratorfunction(getattr(type(dataset), "__iter__", None)):
        return False
    with rng.isolated(0):
        return is_stateful(iter(dataset))


def announce_pass(loader: Any, number: int) -> None:
    """Tell a loader, its dataset and its sampler the number of the pass, if they want to know."""
    for each in (loader, *(getattr(loader, key, None) for key in ("dataset", "sampler"))):
        if hasattr(each, "set_epoch"):
            each.set_epoch(number)


class Unnumbered:
    """What sources have in common that go through something once, and believe what it says."""

    _ranked: Ranked
    drift: Drift

    def mistrust(self) -> None:
        """Warn of a dataset that changes: nothing is fetched twice."""
        self.drift.warns = True

    def flaw(self) -> str:
        """Return nothing: what has a state is believed; the rest is seen only by reading it."""
        return ""

    def obstacle(self) -> str:
        """Return why a standby could not take this rank over."""
        return self._ranked.obstacle()

    def order(self, most: int) -> list[int] | None:
        """Return None: what is read has no numbers."""


class _Standing(msgspec.Struct, frozen=True, array_like=True):
    """Where all shards of a stream stand."""

    turn: int
    """The shard that gives the next batch."""
    shards: dict[int, Shard]
    """Those that have given one."""


_decoder = msgspec.msgpack.Decoder(_Standing)


class ShardedSource(Unnumbered):
    """A torch `DataLoader` over an iterable dataset with a state."""

    restartable = True
    exact = True
    placing = Placing.STATE

    def __init__(self, loader: DataLoader[Any], *, seed: int, rank: int) -> None:
        self._loader = loader
        self._job_seed = seed
        self._rank = rank
        self._ranked = Ranked(loader, rank=rank)
        self.begin = Position(0, 0, torch.initial_seed(), shares=self._ranked.shares)
        self._position = self.begin
        self._shards: dict[int, Shard] = {}
        self._iterator: Any = None
        self._initial = b""
        """What the dataset of this process is set to when a pass begins; workers have copies."""
        if not loader.num_workers and is_stateful(loader.dataset):
            self._initial = pack(loader.dataset.state_dict(), "the dataset's state")  # type: ignore[attr-defined]
        self.drift = Drift(loader)

    def start(self, position: Position, rank: int) -> None:
        """Go to `position`; nothing is done if it stands there for the same rank."""
        if (position, rank) == (self._position, self._rank):
            return
        self._ranked.rebind(rank)
        self._rank = rank
        self.close()
        self._position = position

    def next(self) -> Fetched:
        """Return the next batch, from the next pass if this one is over."""
        for _ in range(2):
            if self._iterator is None:
                self._open()
            with self.drift.reading():
                sent = next(self._iterator, _END)
            if sent is not _END:
                return Fetched(sent.batch, self._note(sent.shard, sent.after), None)
            self.close()
            self._position = next_pass(self._position)
        raise ConfigError(EMPTY)

    def _note(self, number: int, after: Shard | str) -> Position:
        if isinstance(after, str):
            raise StateError(after)
        self._shards[number] = after
        turn = (number + 1) % max(1, self._loader.num_workers)
        state = msgspec.msgpack.encode(_Standing(turn, self._shards))
        if len(state) > LIMIT_BYTES:
            msg = (
                f"the state of the dataset, in {len(self._shards)} loader workers, is more than "
                "the 1 MiB that can be sent to another node with every step"
            )
            raise StateError(msg)
        self._position = advance(self._position, state)
        return self._position

    def _open(self) -> None:
        """Begin where the position says; from the beginning of its pass if it says no state."""
        mine, position = self._loader, self._position
        standing = _decode(position.state, mine.num_workers)
        announce_pass(mine, position.pass_)
        self._shards = dict(standing.shards)
        begin = {0: Shard(0, self._initial)} if self._initial else {}
        stream = ShardedStream(
            mine.dataset,
            collate=mine.collate_fn,
            size=mine.batch_size,
            drop_last=mine.drop_last,
            seed=rng.derive("stream", self._job_seed, position.seed, position.pass_),
            shards={**begin, **standing.shards},
        )
        self._iterator = iter(rebuilt(mine, stream, first=standing.turn, collate_fn=same))
        if not position.state:
            for _ in range(position.batch):
                sent = next(self._iterator, _END)
                if sent is _END:
                    break
                self._note(sent.shard, sent.after)
            self._position = position

    def close(self) -> None:
        """End the pass and its workers."""
        end(self._iterator)
        self._iterator = None


def _decode(state: bytes, workers: int) -> _Standing:
    if not state:
        return _Standing(0, {})
    try:
        standing = _decoder.decode(state)
    except msgspec.DecodeError as error:
        msg = f"where the loader stands cannot be read: {error}"
        raise StateError(msg) from error
    if any(number not in range(max(1, workers)) for number in (standing.turn, *standing.shards)):
        msg = f"the loader stood there with another number of workers than {workers}"
        raise StateError(msg)
    return standing


class OpaqueSource(Unnumbered):
    """A loader that is not torch's and has a state of its own.

    What it fetches in this process has random streams of its own for every batch; what its own
    workers or threads draw is theirs to repeat.
    """

    restartable = True
    exact = True
    placing = Placing.STATE

    def __init__(self, loader: Any, *, seed: int, rank: int) -> None:
        self._loader = loader
        self._what = f"the state of the loader, a `{type(loader).__name__}`,"
        self._job_seed = seed
        self._rank = rank
        self._ranked = Ranked(loader, rank=rank)
        self.begin = Position(0, 0, torch.initial_seed(), shares=self._ranked.shares)
        self._position = self.begin
        self._iterator: Iterator[Any] | None = None
        self._astray = False
        """Whether the loader itself may stand somewhere else."""
        with rng.isolated(seed):
            self._initial = pack(self._loader.state_dict(), self._what)
        self.drift = Drift(None)

    def start(self, position: Position, rank: int) -> None:
        """Load the position's state, unless it stands there for the same rank."""
        if (position, rank) == (self._position, self._rank) and not self._astray:
            return
        if position.batch and not position.state:
            msg = "a loader that is placed by its own state cannot go to where it has not been"
            raise StateError(msg)
        self._ranked.rebind(rank)
        self._rank = rank
        self.close()
        self._position = position
        if hasattr(self._loader, "restart_on_stop_iteration"):
            self._loader.restart_on_stop_iteration = False  # torchdata.nodes: passes are ours
        with rng.isolated(self._seed("load")):
            self._loader.load_state_dict(unpack(position.state or self._initial))
        self._astray = False

    def next(self) -> Fetched:
        """Return the next batch, from the next pass if this one is over."""
        for _ in range(2):
            if self._iterator is None:
                announce_pass(self._loader, self._position.pass_)
                with rng.isolated(self._seed("begin")):
                    self._iterator = iter(self._loader)
            with rng.isolated(self._seed(self._position.batch)):
                batch = next(self._iterator, _END)
                state = b"" if batch is _END else pack(self._loader.state_dict(), self._what)
            if batch is not _END:
                self._position = advance(self._position, state)
                return Fetched(batch, self._position, None)
            end(self._iterator)
            self._iterator = None
            self._position = next_pass(self._position)
        raise ConfigError(EMPTY)

    def _seed(self, what: int | str) -> int:
        return rng.derive("own", self._job_seed, self._position.seed, self._position.pass_, what)

    def close(self) -> None:
        """Let go of the iterator; `start` must be called before `next` is called again."""
        end(self._iterator)
        self._iterator = None
        self._astray = True
