"""The order of samples: a sampler's batches of indices, from any position, again and again.

A sampler runs under streams of its own, seeded by the job's seed, the position's and the pass. The
position's seed is what the script seeded torch with on this rank (or gave the sampler's generator),
and the rank is not mixed in: samplers that split one common order among ranks need all ranks to
draw the same.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tmover.errors import ConfigError
from tmover.state import rng
from tmover.state.generators import torch_generators
from tmover.state.packed import is_stateful
from tmover.state.position import Position, advance, next_pass
from tmover.state.ranked import sampler_chain

_DRAW_AT_ONCE = {
    list,
    range,
    torch.Tensor,
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
}
"""What uses the global streams before its first index only, or never."""


_TRIED = 8
"""So many batches of an unknown sampler are drawn twice."""


class Order:
    """What a loader's samplers yield."""

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        self._top: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._chain = sampler_chain(loader)
        self._job_seed = seed
        self._at_once = all(type(sampler) in _DRAW_AT_ONCE for sampler in self._chain)
        self._generators: list[torch.Generator] = []
        self.seed = torch.initial_seed()
        """This rank's own, as the script set it; a position carries it to a joiner."""
        self._take_generators()
        self._initial = [
            (sampler, copy.deepcopy(sampler.state_dict()))
            for sampler in self._chain
            if is_stateful(sampler)
        ]
        """What samplers with a state are set to when a pass begins."""

    def flaw(self) -> str:
        """Return why the samplers' order is not known, if it is not the same twice.

        Only samplers that are not torch's are asked.
        """
        if self._at_once:
            return ""
        whole, _, again = (self._drawn(number) for number in (_TRIED, 1, _TRIED))
        if whole == again:
            return ""
        name = next(type(s).__name__ for s in self._chain if type(s) not in _DRAW_AT_ONCE)
        return (
            f"`{name}` yields other samples when a pass is begun again from the same seeds, so no "
            "joiner could draw the same: let its order depend on `set_epoch` and on the global "
            "streams of torch, numpy or random alone, and begin anew in every `__iter__`"
        )

    def _drawn(self, number: int) -> list[Any]:
        """Return the first batches of indices of the first pass."""
        drawn = itertools.islice(self._one_pass(Position(0, 0, self.seed)), number)
        return [_plain(indices) for indices in drawn]

    def _take_generators(self) -> None:
        """Give samplers generators of our own in place of the user's."""
        owned: dict[int, torch.Generator] = {}
        for sampler in self._chain:
            for key, theirs in torch_generators(sampler):
                if not owned:
                    self.seed = theirs.initial_seed()
                mine = owned.setdefault(id(theirs), torch.Generator(theirs.device))
                setattr(sampler, key, mine)
        self._generators = list(owned.values())

    def walk(self, position: Position) -> Iterator[tuple[Position, Any]]:
        """Yield batches of indices and their positions from `position` on, pass after pass."""
        while True:
            start = position
            for indices in self._one_pass(position):
                yield position, indices
                position = advance(position)
            if start.batch == 0 and position == start:
                msg = "the loader is empty: it yields no batch"
                raise ConfigError(msg)
            position = next_pass(position)

    def _one_pass(self, position: Position) -> Iterator[Any]:
        seed = rng.derive("order", self._job_seed, position.seed, position.pass_)
        stream = rng.Stream(seed)
        with stream.active():
            for generator in self._generators:
                generator.manual_seed(seed)
            for sampler, initial in self._initial:
                sampler.load_state_dict(copy.deepcopy(initial))
            for sampler in self._chain:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(position.pass_)
            iterator = _from(self._top, position.batch)
            first = next(iterator, _END)
        if first is _END:
            return
        yield first
        while True:
            with contextlib.nullcontext() if self._at_once else stream.active():
                indices = next(iterator, _END)
            if indices is _END:
                return
            yield indices


_END = object()


def _plain(indices: Any) -> Any:
    """Return indices so that they can be compared."""
    return indices.tolist() if isinstance(indices, torch.Tensor) else indices


def _from(top: Any, batch: int) -> Iterator[Any]:
    """Return what `top` yields from number `batch` on, skipped as fast as Python can."""
    if type(top) is not BatchSampler:
        return itertools.islice(top, batch, None)
    samples = itertools.islice(top.sampler, batch * top.batch_size, None)
    return _batched(samples, top.batch_size, drop_last=top.drop_last)


def _batched(samples: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """Yield batches as `BatchSampler` does."""
    while batch := list(itertools.islice(samples, size)):
        if len(batch) < size and drop_last:
            return
        yield batch
