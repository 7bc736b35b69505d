"""Torch's own communicators, as things that are built, used by one group, and aborted.

They cannot exchange a rank in place, so each serves one epoch's members. Aborting completes what is
under way with an error, at once; afterwards a communicator can only be dropped.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist

from tmover.comm.sockets import Handle, speaking
from tmover.comm.store import GroupStore
from tmover.errors import LinkError

_GLOO_THREADS = 2
_GLANCE_S = 0.01


class Communicator(Protocol):
    """One of them, in use."""

    backend: Any
    """Torch's object, whose methods start collectives."""
    store: GroupStore
    """Where its members have met."""

    def abort(self) -> None:
        """End what is under way."""

    def disown(self) -> None:
        """Close the copies of its sockets in a process that was forked from this one."""


class Stock(Protocol):
    """One kind of them."""

    patient: bool
    """Whether `abort` may take long."""

    def note_use(self) -> None:
        """Take note, in the script's own thread, that it is about to be used."""

    def build(self, store: GroupStore, rank: int, size: int, *, timeout_s: float) -> Communicator:
        """Return a new one. Every member does this, and is there; it takes `timeout_s` at most."""

    def is_failure(self, error: Exception, *, at_once: bool) -> bool:
        """Return whether an error means that a peer or a link is gone, not that a call was wrong.

        `at_once`: it came from the call itself, not from waiting for what the call has started.
        """


# --- gloo -----------------------------------------------------------------------------------------


class Gloo:
    """A `ProcessGroupGloo`, and its sockets: it has no `abort`, so they are shut down under it."""

    def __init__(self, backend: Any, store: GroupStore, handles: list[Handle]) -> None:
        self.backend = backend
        self.store = store
        self._handles = handles

    def abort(self) -> None:
        """Shut its connections down: whoever waits for them hears of it."""
        for handle in self._handles:
            handle.shut_down()

    def disown(self) -> None:
        """Close the copies of its sockets in a process that was forked from this one."""
        for handle in self._handles:
            handle.close_in_child()


class GlooStock:
    """Builds communicators of gloo, each with a device, and so a listening socket, of its own."""

    patient = False

    def __init__(self, address: str) -> None:
        self._address = address

    def note_use(self) -> None:
        """Nothing depends on it."""

    def build(self, store: GroupStore, rank: int, size: int, *, timeout_s: float) -> Gloo:
        """Return a new one."""
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=self._address)]
        options._threads = _GLOO_THREADS
        options._timeout = timedelta(seconds=timeout_s)
        try:
            backend = kind(store, rank, size, options)
        except RuntimeError as error:
            msg = f"no gloo communicator: {error}"
            raise LinkError(msg) from error
        return Gloo(backend, store, speaking(store.values()))

    def is_failure(self, error: Exception, *, at_once: bool) -> bool:
        """Return whether it is one: gloo checks arguments at once, and ends us if sizes differ."""
        return isinstance(error, RuntimeError) and not at_once


# --- NCCL -----------------------------------------------------------------------------------------

_NCCL_SETTINGS = {
    "NCCL_RUNTIME_CONNECT": "0",  # or it connects at the first collective, in the pause of a move
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # the watchdog aborts, and does not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does its own watchdog
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Nccl:
    """A `ProcessGroupNCCL`."""

    def __init__(self, backend: Any, store: GroupStore) -> None:
        self.backend = backend
        self.store = store

    def abort(self) -> None:
        """Abort it. Every rank aborts its communicators in the same order."""
        self.backend.abort()

    def disown(self) -> None:
        """Leave everything: a forked process cannot use CUDA."""


class NcclStock:
    """Builds communicators of NCCL, connected before they are used."""

    patient = True

    def __init__(self) -> None:
        self._device: int | None = None

    def note_use(self) -> None:
        """Keep the device: CUDA has a current one for each thread, and others build."""
        self._device = torch.cuda.current_device()

    @property
    def device(self) -> torch.device:
        """The script's device; that of its local rank before it has used any."""
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", local if self._device is None else self._device)

    def build(self, store: GroupStore, rank: int, size: int, *, timeout_s: float) -> Nccl:
        """Return a new one, on the script's device."""
        for name, value in _NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        kind: Any = dist.ProcessGroupNCCL
        options = kind.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=timeout_s)
        deadline = time.monotonic() + timeout_s
        try:
            backend = kind(store, rank, size, options)
            backend._set_sequence_number_for_group()
            backend.eager_connect_single_device(self.device)
            while not backend._is_initialized():
                if time.monotonic() > deadline:
                    backend.abort()
                    msg = f"no NCCL communicator within {timeout_s:g} s"
                    raise LinkError(msg)
                time.sleep(_GLANCE_S)
        except RuntimeError as error:
            msg = f"no NCCL communicator: {error}"
            raise LinkError(msg) from error
        return Nccl(backend, store)

    def is_failure(self, error: Exception, *, at_once: bool) -> bool:
        """Return whether it is one: a peer that is gone may show at once here."""
        return isinstance(error, dist.DistBackendError)


def stocks(fabric: str, address: str) -> dict[str, Stock]:
    """Return what carries the collectives of tensors on each type of device, beside links."""
    if fabric == "links":
        return {}
    found: dict[str, Stock] = {"cpu": GlooStock(address)}
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["cuda"] = NcclStock()
    return found
