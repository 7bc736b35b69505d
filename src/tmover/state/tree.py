"""Plain values with tensors in them, as bytes and back.

A tree is built of None, bools, numbers, strings, bytes, NumPy arrays, lists, tuples, dicts and
tensors. `pack` turns one into nested lists that msgpack can hold, with the tensors taken out into a
list; `unpack` puts it together again. Types survive: a tuple comes back as a tuple, and an
`OrderedDict` or a `Counter` (torch's schedulers hold them) as itself.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from tmover.errors import StateError
from tmover.state import memory

DEPTH = 64
"""Deeper trees are refused: they are cyclic, or no state."""

INT64 = range(-(1 << 63), 1 << 63)

_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": collections.Counter,
}
DICT_TAGS = frozenset(_DICTS)
_TAG_OF_DICT = {kind: tag for tag, kind in _DICTS.items()}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "size": torch.Size,
}
SEQUENCE_TAGS = frozenset({"list", "tuple"})
_TAG_OF_SEQUENCE: dict[Any, str] = {kind: tag for tag, kind in _SEQUENCES.items()}
Path = tuple[Any, ...]
"""The keys and indices that lead to a value of a tree."""
_ATOMS = (type(None), bool, float, bytes)


class Ref(NamedTuple):
    """Where a tensor was taken out: its number among the tensors."""

    number: int


class Tensors:
    """The tensors of one or several trees, each held once however often it occurs."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Return the index of `tensor`, which is added if it is new."""
        index = self._index.setdefault(id(tensor), len(self.held))
        if index == len(self.held):
            self.held.append(tensor)
        return index


def pack(value: Any, tensors: Tensors, path: str = "", depth: int = 0) -> Any:
    """Return `value` as nested lists, its tensors moved to `tensors`; what is a `Ref` stays one.

    Raises `StateError` naming the path of what is no plain value.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is int:
        return value if value in INT64 else ["int", hex(value)]
    if kind is str:
        return _checked_text(value, path)
    if kind is complex:
        return ["complex", value.real, value.imag]
    if depth > DEPTH:
        msg = f"{path[:80]}… is nested too deeply, or contains itself"
        raise StateError(msg)
    if kind in _TAG_OF_SEQUENCE:
        items = [pack(v, tensors, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        return [_TAG_OF_SEQUENCE[kind], items]
    if kind in _TAG_OF_DICT:
        return [
            _TAG_OF_DICT[kind],
            [_pack_item(k, v, tensors, path, depth) for k, v in value.items()],
        ]
    if kind is Ref:
        return ["tensor", value.number]
    if isinstance(value, torch.Tensor):
        memory.refuse_unreadable(value, path)
        return ["tensor", tensors.add(value)]
    return _pack_array(value, path)


def _pack_item(key: Any, value: Any, tensors: Tensors, path: str, depth: int) -> list[Any]:
    inner = f"{path}[{key!r:.60}]"
    held = len(tensors.held)
    packed = pack(key, tensors, f"key of {inner}", depth + 1)
    if len(tensors.held) != held:
        msg = (
            f"key of {inner} is {describe(key)}; keys are numbers, strings, bytes or tuples of them"
        )
        raise StateError(msg)
    return [packed, pack(value, tensors, inner, depth + 1)]


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        msg = f"{path} is text that UTF-8 cannot hold"
        raise StateError(msg) from error
    return text


def _pack_array(value: Any, path: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        exact = type(value) is numpy.ndarray or isinstance(value, numpy.generic)
        if exact and not value.dtype.hasobject and value.dtype.names is None:
            tag = "array" if isinstance(value, numpy.ndarray) else "scalar"
            return [tag, value.dtype.str, list(value.shape), value.tobytes()]
    msg = (
        f"{path} is {describe(value)}; state holds tensors, arrays, numbers, strings, bytes, None, "
        "lists, tuples and dicts of them"
    )
    raise StateError(msg)


def describe(value: Any) -> str:
    """Return what `value` is, in words for an error."""
    kind = type(value)
    name = {
        "function": "a function",
        "builtin_function_or_method": "a function",
        "method": "a bound method",
        "generator": "a generator",
        "set": "a set",
        "frozenset": "a set",
        "type": "a class",
        "module": "a module",
    }.get(kind.__name__)
    return name or f"a `{kind.__module__}.{kind.__qualname__}`"


def encode(packed: Any) -> bytes:
    """Return what `pack` made as bytes."""
    return msgspec.msgpack.encode(packed)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return what `encode` was given. Raises `StateError` for anything else."""
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        msg = f"state header cannot be read: {error}"
        raise StateError(msg) from error


class Indexed(Protocol):
    """Something that holds tensors by index."""

    def __getitem__(self, index: int, /) -> Any: ...


def unpack(packed: Any, tensors: Indexed | None = None) -> Any:
    """Return the tree of `packed`; its tensors from `tensors`, or as `Ref`s if that is None.

    Raises `StateError` if `packed` was not made by `pack`.
    """
    try:
        return _unpack(packed, tensors, 0)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        msg = f"state header makes no sense: {error}"
        raise StateError(msg) from error


def _unpack(packed: Any, tensors: Indexed | None, depth: int) -> Any:
    if not isinstance(packed, list):
        return _unpack_atom(packed)
    if depth > DEPTH:
        msg = "nested too deeply"
        raise ValueError(msg)
    tag, *rest = packed
    if tag in _SEQUENCES:
        (items,) = rest
        return _SEQUENCES[tag]([_unpack(v, tensors, depth + 1) for v in items])
    if tag in _DICTS:
        (items,) = rest
        pairs = [
            (_unpack(key, None, depth + 1), _unpack(value, tensors, depth + 1))
            for key, value in items
        ]
        return _DICTS[tag](dict(pairs)) if len(dict(pairs)) == len(pairs) else _repeated_key()
    if tag == "tensor":
        (index,) = rest
        return _tensor(index, tensors)
    return _unpack_number(tag, rest)


def _unpack_atom(packed: Any) -> Any:
    if packed is None or type(packed) in (bool, int, float, str, bytes):
        return packed
    msg = f"unexpected {type(packed).__name__}"
    raise ValueError(msg)


def _repeated_key() -> Any:
    msg = "a key occurs twice"
    raise ValueError(msg)


def _tensor(index: Any, tensors: Indexed | None) -> Any:
    if type(index) is not int or index < 0:
        msg = "a tensor's index is no index"
        raise ValueError(msg)
    return Ref(index) if tensors is None else tensors[index]


def _unpack_number(tag: Any, rest: list[Any]) -> Any:
    if tag == "int":
        (digits,) = rest
        return int(digits, 16)
    if tag == "complex":
        real, imag = rest
        return complex(real, imag)
    if tag in ("array", "scalar"):
        import numpy as np

        dtype, shape, data = rest
        array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
        return array if tag == "array" else array[()]
    msg = f"unknown tag {tag!r:.40}"
    raise ValueError(msg)


def references(value: Any, path: Path = ()) -> Iterator[tuple[Path, Ref]]:
    """Yield where in a tree each reference to a tensor stands."""
    if isinstance(value, Ref):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from references(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from references(inner, (*path, index))
