"""Torch's loaders, made anew around a dataset of ours.

What is known of a `DataLoader` holds for torchdata's `StatefulDataLoader` too: it takes the same
arguments, and where it stands is for the session to say.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader

from tmover.state.fetching import WorkerStart, spawns_children

_TORCHDATA = "torchdata.stateful_dataloader"


def is_torchdatas(loader: Any) -> bool:
    """Return whether this is a `StatefulDataLoader` whose iteration nobody has changed."""
    module = sys.modules.get(_TORCHDATA)
    return (
        module is not None
        and isinstance(loader, module.StatefulDataLoader)
        and type(loader).__iter__ is module.StatefulDataLoader.__iter__
    )


def is_torchs(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Return whether this is a `DataLoader`, torch's or torchdata's, whose iteration is theirs."""
    if not isinstance(loader, DataLoader):
        return False
    return type(loader).__iter__ is DataLoader.__iter__ or is_torchdatas(loader)


def rebuilt(
    mine: DataLoader[Any], dataset: Any, *, first: int = 0, **changed: Any
) -> DataLoader[Any]:
    """Return a loader like `mine` over `dataset`, which draws nothing from the global streams.

    `first`: which of its workers gives the first batch.
    """
    child = spawns_children(mine.multiprocessing_context)
    given = {
        "batch_size": None,
        "num_workers": mine.num_workers,
        "collate_fn": mine.collate_fn,
        "pin_memory": mine.pin_memory,
        "timeout": mine.timeout,
        "worker_init_fn": WorkerStart(mine.worker_init_fn, child=child, first=first),
        "multiprocessing_context": mine.multiprocessing_context,
        "generator": torch.Generator(),
        "prefetch_factor": mine.prefetch_factor if mine.num_workers else None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DataLoader(dataset, **{**given, **changed})


def end(iterator: Any) -> None:
    """End the workers of a loader's iterator, if it has some."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
