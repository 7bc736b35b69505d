"""What belongs to a loader and stands where no record says: generators, iterators, threads.

What they yield depends on everything that was drawn before, in this process. A sampler's torch
generator is replaced by one that is seeded anew in every pass; any other is refused by its path.
They are looked for in what the dataset, the samplers and `collate_fn` hold, and among the globals
that their functions use. What has a state of its own is believed to know.
"""

from __future__ import annotations

import concurrent.futures
import csv
import itertools
import multiprocessing.pool
import multiprocessing.process
import os
import random
import secrets
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch

from tmover.state.packed import is_stateful
from tmover.state.reach import Reached, reachable

_GENERATOR = (
    "is a random generator of its own, and no joiner could go on where it stands: draw from the "
    "global streams of torch, numpy or random, which are seeded for every batch"
)
_SYSTEM = (
    "draws from the operating system, and nobody could draw the same again: draw from the global "
    "streams of torch, numpy or random, which are seeded for every batch"
)
_ITERATOR = (
    "is an iterator, and no joiner could go on where it stands: make it anew in `__iter__`, or "
    "give the dataset `state_dict` and `load_state_dict`"
)
_THREAD = (
    "works beside the loader: what it has fetched ahead, and what it draws at random, no joiner "
    "could repeat; let loader workers do it (`num_workers`)"
)
_HARMLESS = (itertools.count, itertools.repeat)
"""What numbers things, or yields the same for ever."""
_NEAR = 2
"""An iterator or a thread further away is a library's own affair."""
_ITERATORS: tuple[type, ...] = (
    types.GeneratorType,
    map,
    filter,
    zip,
    enumerate,
    type(iter([])),
    type(iter(())),
    type(iter({})),
    type(iter(range(1))),
    type(csv.reader([])),
    *(
        kind
        for kind in vars(itertools).values()
        if isinstance(kind, type) and kind not in _HARMLESS
    ),
)
_THREADS: tuple[type, ...] = (
    threading.Thread,
    concurrent.futures.Executor,
    multiprocessing.pool.Pool,
    multiprocessing.process.BaseProcess,
)


def torch_generators(owner: Any) -> Iterator[tuple[str, torch.Generator]]:
    """Yield the torch generators that an object holds, by attribute."""
    for key, value in list(getattr(owner, "__dict__", {}).items()):
        if isinstance(value, torch.Generator):
            yield key, value


def obstacle(loader: Any, samplers: list[Any]) -> str:
    """Return what of a loader no joiner could go on with; nothing if there is no such thing."""
    dataset = getattr(loader, "dataset", None)
    roots = [dataset, getattr(loader, "collate_fn", None)]
    if dataset is None:
        roots.append(loader)
    for root in roots:
        if root is not None and not is_stateful(root):
            for reached in reachable(root):
                if reason := _reason(reached):
                    return f"`{reached.path}` {reason}"
    taken_over = {id(each) for sampler in samplers for _, each in torch_generators(sampler)}
    for sampler in reversed(samplers):
        for reached in reachable(sampler):
            if id(reached.value) not in taken_over and (reason := _reason(reached)):
                return f"`{reached.path}` {reason}"
    return ""


def _reason(reached: Reached) -> str:
    """Return what is wrong with an object of a loader."""
    value = reached.value
    if isinstance(value, random.SystemRandom) or value is secrets or value is os.urandom:
        return _SYSTEM
    if isinstance(value, _kinds()) and not any(value is each for each in _seeded_by_us()):
        return _GENERATOR
    if reached.depth > _NEAR:
        return ""
    if isinstance(value, _ITERATORS):
        return _ITERATOR
    return _THREAD if isinstance(value, _THREADS) else ""


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    own = (random.Random, torch.Generator)
    return own if numpy is None else (*own, numpy.random.Generator, numpy.random.RandomState)


def _seeded_by_us() -> list[Any]:
    """Return the generators behind the global streams."""
    numpy = sys.modules.get("numpy")
    ours = [vars(random)["_inst"], torch.default_generator]
    return ours if numpy is None else [*ours, numpy.random.mtrand._rand]
