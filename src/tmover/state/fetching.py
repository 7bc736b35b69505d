"""How a batch is fetched: under random streams of its own, wherever that happens.

`SeededDataset` stands before the user's dataset, in loader workers and in process alike. It is
asked with a `Ticket`, and what it returns depends on the ticket alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info

from tmover.state import marks, rng

_PR_SET_PDEATHSIG = 1
_connection: Any = connection
_address = _connection.arbitrary_address


class Ticket(NamedTuple):
    """One batch to fetch."""

    serial: int
    """Counts what was asked for, so that what nobody waits for any more can be told."""
    seed: int
    indices: Any
    """What the sampler gave: the samples' indices, or a single one without batching."""


class Varies(NamedTuple):
    """Comes in the place of a batch that was not the same when it was fetched twice."""

    dataset: str


class Wrapped:
    """A dataset of ours around the user's."""

    dataset: Any


class SeededDataset(Wrapped, Dataset[Any]):
    """A dataset of whole batches, each fetched under the streams its ticket names."""

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], wanted: torch.Tensor, *, batched: bool
    ) -> None:
        """`wanted` is shared with the rank: tickets before that serial are not fetched."""
        self.dataset = dataset
        self._collate = collate
        self._wanted = wanted
        self._batched = batched
        self.reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Looks on while a batch is fetched."""
        self.twice = False
        """Whether the first batch is fetched twice, in each worker, to see that it is the same."""

    def __getitem__(self, ticket: Ticket) -> tuple[int, Any]:
        if ticket.serial < self._wanted:
            return ticket.serial, None
        batch = self._seeded(ticket)
        if self.twice:
            self.twice = False
            if marks.digest(self._seeded(ticket)) != marks.digest(batch):
                return ticket.serial, Varies(type(self.dataset).__name__)
        return ticket.serial, batch

    def _seeded(self, ticket: Ticket) -> Any:
        if get_worker_info() is not None:
            rng.seed(ticket.seed)
            return self._fetch(ticket.indices)
        with rng.isolated(ticket.seed), self.reading():
            return self._fetch(ticket.indices)

    def _fetch(self, indices: Any) -> Any:
        if not self._batched:
            return self._collate(self.dataset[indices])
        together = getattr(self.dataset, "__getitems__", None)
        samples = together(indices) if together else [self.dataset[i] for i in indices]
        return self._collate(samples)


def same(value: Any) -> Any:
    """Return `value`: batches are collated before torch's loader sees them."""
    return value


class WorkerStart:
    """What a loader worker does first: end when the rank ends, then what the user asked for."""

    def __init__(self, then: Callable[[int], None] | None, *, child: bool, first: int = 0) -> None:
        """`first`: which worker the first one is to be; the others follow, and begin anew at 0."""
        self._then = then
        self._first = first
        self._parent = os.getpid() if child else None
        """The rank's process, unless workers come from a fork server."""

    def __call__(self, worker_id: int) -> None:
        """Run in the worker before it fetches anything."""
        if self._parent is not None:
            _die_with(self._parent)
        _connection.arbitrary_address = _abstract_address
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Wrapped):
            object.__setattr__(info, "dataset", info.dataset.dataset)
            worker_id = (worker_id + self._first) % info.num_workers
            object.__setattr__(info, "id", worker_id)
        if self._then is not None:
            self._then(worker_id)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _abstract_address(family: str) -> str:
    """Return an address for a listener: one that leaves no file when its process is killed."""
    if family == "AF_UNIX":
        return f"\0tmover-loader-{secrets.token_hex(16)}"
    return str(_address(family))


def spawns_children(context: Any) -> bool:
    """Return whether loader workers of this multiprocessing context are our own children."""
    if context is None:
        method = multiprocessing.get_start_method()
    else:
        method = context if isinstance(context, str) else context.get_start_method()
    return method != "forkserver"
