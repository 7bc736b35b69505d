"""What of a loader depends on the rank, and how it is told another one.

A standby rehearses one rank and may be promoted into any other. Whether a loader's samples depend
on the rank cannot be seen from outside: a per-rank `Subset` or an `IterableDataset` that was built
with its rank looks like any other. So only a loader that has a hook for its rank can be rebound: an
attribute `rank` that holds the global rank, as a `DistributedSampler` has, or a method
`set_rank(rank)`, on the loader, a sampler or the dataset. Everything else is refused when the loop
begins, not when a node is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tmover.errors import StateError


def sampler_chain(loader: Any) -> list[Any]:
    """Return a loader's sampler, or batch sampler, and those it draws from."""
    top = getattr(loader, "batch_sampler", None)
    top = getattr(loader, "sampler", None) if top is None else top
    chain: list[Any] = []
    while top is not None and not any(top is seen for seen in chain):
        chain.append(top)
        below = getattr(top, "sampler", None)
        top = getattr(top, "batch_sampler", None) if below is None else below
    return chain


class Ranked:
    """A loader's parts that can be told a rank."""

    def __init__(self, loader: Any, *, rank: int) -> None:
        self._what = _describe(loader)
        self._dataset = getattr(loader, "dataset", None)
        self._parts = [part for part in _parts(loader) if _sets(part) or _holds(part)]
        self._rank = rank

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank has: that of its sampler, else its own rank.

        Ranks that split one model between them have the same, and see the same augmentations.
        """
        return next((part.rank for part in self._parts if _holds(part)), self._rank)

    @property
    def shares(self) -> int:
        """Among how many the samples are divided, as a `DistributedSampler` says; 0 if none does.

        Ranks that split one model between them have one share together.
        """
        held = (getattr(part, "num_replicas", 0) for part in self._parts if _holds(part))
        return next((number for number in held if isinstance(number, int)), 0)

    def obstacle(self) -> str:
        """Return why the loader cannot become another rank's; nothing if it can."""
        if not self._parts:
            return (
                f"{self._what} does not say how it depends on the rank, so no standby could take "
                "its rank over: use a DistributedSampler, or give the dataset, the sampler or the "
                "loader an attribute `rank` that can be set, or a method `set_rank(rank)` (one "
                "that does nothing, if every rank reads the same)"
            )
        reasons = (self._obstacle_of(part) for part in self._parts if not _sets(part))
        return next((reason for reason in reasons if reason), "")

    def _obstacle_of(self, part: Any) -> str:
        name = type(part).__name__
        if part.rank != self._rank:
            return (
                f"`{name}` splits for rank {part.rank}, not for the global rank {self._rank}: "
                "nobody knows what it becomes on another rank; give it a method `set_rank(rank)`"
            )
        try:
            part.rank = part.rank
        except AttributeError:
            return f"the attribute `rank` of `{name}` cannot be set; give it `set_rank(rank)`"
        return ""

    def rebind(self, rank: int) -> bool:
        """Tell every part its new rank; return whether the dataset, which workers copy, was told.

        Raises `StateError` if the loader cannot become another rank's.
        """
        if rank == self._rank:
            return False
        if reason := self.obstacle():
            msg = f"a joiner cannot become rank {rank}: {reason}"
            raise StateError(msg)
        for part in self._parts:
            if _sets(part):
                part.set_rank(rank)
            else:
                part.rank = rank
        self._rank = rank
        return any(part is self._dataset for part in self._parts)


def _parts(loader: Any) -> Iterator[Any]:
    yield loader
    yield getattr(loader, "dataset", None)
    yield from sampler_chain(loader)


def _sets(part: Any) -> bool:
    return callable(getattr(part, "set_rank", None))


def _holds(part: Any) -> bool:
    return isinstance(getattr(part, "rank", None), int)


def _describe(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    over = "" if dataset is None else f" over `{type(dataset).__name__}`"
    return f"the loader, a `{type(loader).__name__}`{over},"
