"""What a dataset without a state changes of itself as it is read: no joiner is handed that.

Nothing deep is looked at, and nothing large: of a dataset's own attributes the numbers and texts
are compared by value, containers by their length, arrays by their shape, around each of the first
few fetches, if these are done in the rank's own process.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import numbers
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tmover.state.packed import is_stateful
from tmover.state.rebuilding import is_torchs

logger = logging.getLogger(__name__)

_READINGS = 4
_MOST = 8
"""So many datasets inside one another are looked at."""
_CONTAINERS = (dict, list, tuple, set, frozenset, bytearray, collections.deque)
_TORCHS = frozenset({"_number_of_samples_yielded", "_snapshot_state", "_valid_iterator_id"})
"""What torch's data pipes count for themselves."""
_WARNING = (
    "%s as it is read: a joiner begins with its own, as its rehearsal has left it; "
    "`tmover check-loader SCRIPT` tells whether that changes a batch"
)


class _Owner(NamedTuple):
    """What may keep something from sample to sample."""

    what: str
    value: Any


class Drift:
    """Looks at what a loader reads from, before and after."""

    def __init__(self, loader: Any) -> None:
        self._owners = () if getattr(loader, "num_workers", 0) else tuple(_owners(loader))
        self._left = _READINGS if self._owners else 0
        self._changed: dict[str, list[str]] = {}
        self.warns = False
        """Whether the log says what was found, once."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Compare around one fetch, if it is one of the first."""
        if not self._left:
            yield
            return
        self._left -= 1
        before = [_plain(owner.value) for owner in self._owners]
        yield
        for owner, old in zip(self._owners, before, strict=True):
            for name, value in _plain(owner.value).items():
                if old.get(name, _NONE) != value:
                    self._note(owner, name)
        if self.warns and self._changed:
            self._left = 0
            logger.warning(_WARNING, "; ".join(self.changes()))

    def _note(self, owner: _Owner, name: str) -> None:
        called = getattr(owner.value, "__qualname__", None) or type(owner.value).__name__
        names = self._changed.setdefault(f"the {owner.what} `{called}`", [])
        if name not in names:
            names.append(name)

    def changes(self) -> tuple[str, ...]:
        """Return in words who has changed what so far."""
        quoted = {who: (f"`{name}`" for name in names) for who, names in self._changed.items()}
        return tuple(f"{who} changes its {', '.join(names)}" for who, names in quoted.items())


_NONE = object()


def _owners(loader: Any) -> Iterator[_Owner]:
    """Yield what a loader reads from, unless it says by a state where it stands."""
    if not is_torchs(loader):
        yield _Owner("loader", loader)
    found = collections.deque([getattr(loader, "dataset", None)])
    for _ in range(_MOST):
        if not found:
            break
        dataset = found.popleft()
        if dataset is None or is_stateful(dataset):
            continue
        yield _Owner("dataset", dataset)
        held = getattr(dataset, "__dict__", {})
        found.append(held.get("dataset"))
        several = held.get("datasets")
        found.extend(itertools.islice(several, _MOST) if isinstance(several, (list, tuple)) else ())
    if getattr(loader, "collate_fn", None) is not None:
        yield _Owner("collate_fn", loader.collate_fn)


def _plain(owner: Any) -> dict[str, object]:
    """Return what can be compared of an object's own attributes, or of what a function keeps.

    >>> _plain(types.SimpleNamespace(n=3, seen=[1, 2], file=open))
    {'n': (<class 'int'>, 3), 'seen': (<class 'list'>, 2)}
    """
    held = _of_function(owner) if isinstance(owner, types.FunctionType) else _of_object(owner)
    looked = {name: _worth(value) for name, value in held.items() if name not in _TORCHS}
    return {name: worth for name, worth in looked.items() if worth is not None}


def _of_object(owner: Any) -> dict[str, Any]:
    return dict(getattr(owner, "__dict__", {}))


def _of_function(function: types.FunctionType) -> dict[str, Any]:
    """Return the defaults of its arguments, which live as long as it does."""
    defaults, code = function.__defaults__ or (), function.__code__
    first = code.co_argcount - len(defaults)
    names = code.co_varnames[first : code.co_argcount]
    return {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


def _worth(value: Any) -> tuple[type, object] | None:
    """Return what a value is compared by; None if it is not looked at."""
    if value is None or isinstance(value, (str, bytes)):
        return type(value), value
    if isinstance(value, numbers.Complex):
        return type(value), value if value == value else "nan"
    if isinstance(value, _CONTAINERS):
        return type(value), len(value)
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray)):
        return type(value), tuple(value.shape)
    return None
