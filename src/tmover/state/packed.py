"""What a `state_dict` returns as bytes that fit into a rank's record, and back.

The record of every rank goes to another node with every step, and the loader's state is a part of
it. So it is limited: it has to say where the data stands, and not to hold the data.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tmover.errors import StateError
from tmover.state import memory, tree
from tmover.state.memory import Layout

LIMIT_BYTES = 1 << 20


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    tree: Any
    layouts: tuple[Layout, ...]
    tensors: tuple[bytes, ...]


_decoder = msgspec.msgpack.Decoder(_Packed)


def is_stateful(thing: Any) -> bool:
    """Return whether a thing can say where it stands, and be put there again."""
    if isinstance(thing, type):
        return False
    named = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(each) for each in named)


def pack(state: Any, what: str) -> bytes:
    """Return a state as bytes. Raises `StateError` naming what is no plain value, or too large."""
    tensors = tree.Tensors()
    packed = tree.pack(state, tensors, what)
    layouts = tuple(memory.layout(tensor) for tensor in tensors.held)
    data = msgspec.msgpack.encode(
        _Packed(packed, layouts, tuple(memory.copy_out([t.detach() for t in tensors.held])))
    )
    if len(data) > LIMIT_BYTES:
        path, size = _largest(state, what)
        msg = (
            f"{what} is {len(data) / LIMIT_BYTES:.1f} MiB, of which {path} is "
            f"{size / LIMIT_BYTES:.1f}; it is sent to another node with every step and may have "
            "1 MiB: let `state_dict` return where the data stands, and not the data"
        )
        raise StateError(msg)
    return data


def unpack(data: bytes) -> Any:
    """Return the state that `pack` was given. Raises `StateError` for anything else."""
    try:
        packed = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        msg = f"a loader's state cannot be read: {error}"
        raise StateError(msg) from error
    pairs = zip(packed.tensors, packed.layouts, strict=True)
    values = [memory.from_bytes(content, layout) for content, layout in pairs]
    return tree.unpack(packed.tree, values)


def _largest(state: Any, what: str) -> tuple[str, int]:
    """Return the path of the largest part of a state, as deep as it is most of its parent."""
    path, size = what, _size(state)
    while isinstance(state, (dict, list, tuple)) and state:
        items = state.items() if isinstance(state, dict) else enumerate(state)
        key, inner = max(items, key=lambda item: _size(item[1]))
        inner_size = _size(inner)
        if 2 * inner_size < size:
            break
        path, size, state = f"{path}[{key!r}]", inner_size, inner
    return path, size


def _size(state: Any) -> int:
    tensors = tree.Tensors()
    packed = tree.encode(tree.pack(state, tensors))
    return len(packed) + sum(memory.layout(tensor).size_bytes for tensor in tensors.held)
