"""A rank's batches: the same sequence in any process, from any position.

What a batch holds depends on the job's seed, the rank and its position alone: the order of samples
and every random augmentation repeat on a joiner. The process's own random streams are never
touched.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sized
from typing import Any

import msgspec

from tmover.core.events import Placing
from tmover.errors import ConfigError, StateError
from tmover.state import generators, resuming
from tmover.state.fingerprint import Fingerprint
from tmover.state.position import Fetched, Position
from tmover.state.ranked import sampler_chain
from tmover.state.sources import ONCE, source

__all__ = ["Batches", "Position"]


class Batches:
    """Iterates what the user gave to `steps`, pass after pass, without an end."""

    def __init__(self, loader: Iterable[Any], *, seed: int, rank: int) -> None:
        self._loader = loader
        self._source = source(loader, seed=seed, rank=rank)
        self._rank = rank
        self._position = self._source.begin
        begin = resuming.connect(loader, self.position)
        if begin is not None:
            begin = msgspec.structs.replace(begin, shares=self._position.shares)
            self._source.start(begin, rank)
            self._position = begin
        self._before = self._position
        self._current: Fetched | None = None
        self._fingerprint = Fingerprint(None)
        self._lost = False

    @property
    def placing(self) -> Placing:
        """How `seek` goes to its position."""
        return self._source.placing

    @property
    def restartable(self) -> bool:
        """Whether `seek` works: false for an iterator that can be gone through only once."""
        return self._source.restartable

    @property
    def exact(self) -> bool:
        """Whether `seek` goes straight to its position, and does not fetch everything before it."""
        return self._source.exact

    def require_movable(self, *, slots: int) -> None:
        """Raise `ConfigError` if a standby could not go on with these batches.

        In a job of one slot a joiner always gets the rank that it has rehearsed.
        """
        if not self.restartable:
            raise ConfigError(ONCE)
        reason = generators.obstacle(self._loader, sampler_chain(self._loader))
        reason = reason or self._source.flaw()
        if slots > 1:
            reason = reason or self._source.obstacle()
        if reason:
            raise ConfigError(reason)

    def mistrust(self) -> None:
        """Have what can be fetched twice fetched so at first.

        If it is not the same, `next` raises `ConfigError`. What only may not be is warned of.
        """
        self._source.mistrust()

    def changes(self) -> tuple[str, ...]:
        """Return in words what the dataset, or what else is read from, has changed of itself."""
        return self._source.drift.changes()

    def length(self) -> int:
        """Return the number of batches of a pass. Raises `ConfigError` if nobody knows it."""
        try:
            if isinstance(self._loader, Sized):
                return len(self._loader)
        except TypeError:
            pass
        msg = "the loader has no length: say how many steps there are, `steps(loader, total=...)`"
        raise ConfigError(msg)

    def position(self) -> Position:
        """Return where the next batch is: after the last one that `next` returned."""
        return self._position

    def samples(self) -> list[Any] | None:
        """Return the indices of the last batch's samples, or None if they have none."""
        if self._current is None or self._current.indices is None:
            return None
        return [operator.index(i) if hasattr(i, "__index__") else i for i in self._current.indices]

    def order(self, most: int) -> list[int] | None:
        """Return the numbers of the samples of the first pass, as far as `most` batches.

        None if they have no numbers. Nothing is fetched.
        """
        return self._source.order(most)

    def next(self) -> Any:
        """Return the next batch."""
        if self._lost:
            self._source.start(self._position, self._rank)
            self._lost = False
        before = self._position
        try:
            fetched = self._source.next()
        except BaseException:
            self.close()
            raise
        self._before, self._position = before, fetched.after
        self._current = fetched
        self._fingerprint = Fingerprint(fetched.batch)
        return fetched.batch

    def again(self) -> Any:
        """Return the last batch as it came: itself, or fetched again if it was changed since."""
        if self._current is None:
            msg = "there is no batch to fetch again"
            raise StateError(msg)
        if self._fingerprint.matches(self._current.batch):
            return self._current.batch
        self.seek(self._before)
        return self.next()

    def seek(self, position: Position, *, rank: int | None = None) -> None:
        """Let the next batch be the one at `position`, as `rank` (by default this one) sees it.

        What depends on the rank is rebound in place (see `ranked`); loader workers stay, unless
        the dataset depends on it. Raises `StateError` if something cannot be rebound, `ConfigError`
        if the loader cannot start again.
        """
        rank = self._rank if rank is None else rank
        self._source.start(position, rank)
        self._rank = rank
        self._position = position
        self._current = None
        self._lost = False

    def rebind(self, rank: int) -> None:
        """Hold `rank` from now on: the next batch is that rank's, at the same position."""
        if rank != self._rank:
            self.seek(self._position, rank=rank)

    def close(self) -> None:
        """End loader workers. A later `next` goes on from the same position."""
        self._source.close()
        self._lost = True
