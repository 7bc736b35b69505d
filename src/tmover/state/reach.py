"""What can be reached from an object: what it holds, and the globals that its functions use.

Functions of Python itself and of installed packages are not looked into: they keep much that has
nothing to do with the data, such as the generator that names temporary files.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import itertools
import logging
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

_DEPTH = 6
_MOST = 20_000
"""So many objects are looked at: beyond, it would cost more than a batch."""
_ITEMS = 1_000
"""So many items of one container: what is longer is data."""
_ENTRIES = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward")
"""The methods by which a loader uses its parts."""
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_LEAVES = (
    str, bytes, bytearray, int, float, complex, type(None), type, torch.Tensor, logging.Logger,
)  # fmt: skip
_Found = tuple[str, Any]


class Reached(NamedTuple):
    """An object, the path that leads to it, and how many turns that takes."""

    path: str
    value: Any
    depth: int


def reachable(root: Any) -> Iterator[Reached]:
    """Yield objects, near ones first."""
    seen: set[int] = set()
    queue: collections.deque[tuple[str, Any, int]] = collections.deque([(_name(root), root, 0)])
    while queue and len(seen) < _MOST:
        path, value, depth = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        yield Reached(path, value, depth)
        if depth < _DEPTH and not isinstance(value, types.ModuleType):
            queue.extend((inner, each, depth + 1) for inner, each in _inside(path, value))


def _name(root: Any) -> str:
    return getattr(root, "__qualname__", None) or type(root).__name__


def _inside(path: str, value: Any) -> Iterator[_Found]:
    if isinstance(value, Mapping):
        for key, inner in itertools.islice(value.items(), _ITEMS):
            yield f"{path}[{key!r:.40}]", inner
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for number, inner in enumerate(itertools.islice(value, _ITEMS)):
            yield f"{path}[{number}]", inner
    elif isinstance(value, types.MethodType):
        yield path, value.__self__
        yield path, value.__func__
    elif isinstance(value, types.BuiltinMethodType):
        yield path, value.__self__
    elif isinstance(value, functools.partial):
        yield from ((path, each) for each in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    else:
        yield from _attributes(path, value)
        yield from _of_methods(value)


def _attributes(path: str, value: Any) -> Iterator[_Found]:
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    held = {name: getattr(value, name, None) for name in names if not name.startswith("__")}
    for key, inner in {**held, **getattr(value, "__dict__", {})}.items():
        yield f"{path}.{key}", inner


def _of_methods(value: Any) -> Iterator[_Found]:
    """Yield what the methods use that a loader calls, and those that they call in turn."""
    kind = type(value)
    names, done = list(_ENTRIES), set()
    while names:
        name = names.pop()
        function = getattr(kind, name, None)
        if name in done or not isinstance(function, types.FunctionType):
            continue
        done.add(name)
        if not _is_library(function):
            yield from _of_function(function)
            names += _attribute_names(function.__code__)


def _of_function(function: types.FunctionType) -> Iterator[_Found]:
    if _is_library(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield name, cell.cell_contents
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"{function.__qualname__}()", default
    attributes = _attribute_names(function.__code__)
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        yield name, value
        if isinstance(value, types.ModuleType):
            yield from ((f"{name}.{key}", vars(value).get(key)) for key in attributes)


def _is_library(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith((*_LIBRARIES, "<frozen"))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _global_names(code: types.CodeType) -> tuple[str, ...]:
    return _names(code, frozenset({"LOAD_GLOBAL", "LOAD_NAME"}))


def _attribute_names(code: types.CodeType) -> tuple[str, ...]:
    return _names(code, frozenset({"LOAD_ATTR", "LOAD_METHOD"}))


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType, operations: frozenset[str]) -> tuple[str, ...]:
    """Return the names that a function loads by these instructions, the ones inside it too."""
    instructions = (each for inner in _codes(code) for each in dis.get_instructions(inner))
    return tuple(str(each.argval) for each in instructions if each.opname in operations)
