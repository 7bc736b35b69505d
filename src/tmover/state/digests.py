"""What a rank holds after a step, as one short digest per name.

One digest of everything says that two runs are not equal; these say where they part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import xxhash

from tmover.state import memory, rng, tree
from tmover.state.capture import Tracked
from tmover.state.parts import ModulePart, OptimizerPart, Part
from tmover.state.records import Record


def digests(tracked: Tracked, record: Record) -> dict[str, str]:
    """Return a digest by name of all that is tracked now, and of streams and position as recorded.

    Streams come first, then what is tracked in the order in which it was.
    """
    found = {f"random stream: {k}": _hash(v) for k, v in rng.split(record.streams).items()}
    found["loader: position"] = _hash(msgspec.msgpack.encode(record.position))
    parts = tracked.every_part()
    parameters = dict(_parameters(parts))
    tensors: dict[str, torch.Tensor] = {}
    for each in parts:
        for name, value in _named(each, parameters):
            if isinstance(value, torch.Tensor):
                tensors[name] = value.detach().resolve_conj().resolve_neg().contiguous()
            else:
                found[name] = _hash(tree.encode(tree.pack(value, tree.Tensors())))
    contents = memory.copy_out(list(tensors.values()))
    for (name, tensor), content in zip(tensors.items(), contents, strict=True):
        found[name] = _hash(content, f"{tensor.dtype}{list(tensor.shape)}")
    return found


def _parameters(parts: list[Part]) -> Iterator[tuple[int, str]]:
    """Yield what each parameter of a tracked module is called, by its id."""
    for each in parts:
        if isinstance(each, ModulePart):
            for key, parameter in each.parameters().items():
                yield id(parameter), f"{each.name}.{key}"


def _named(each: Part, parameters: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of everything that a part holds."""
    state = each.tree()
    if isinstance(each, ModulePart):
        for kind in ("parameters", "buffers", "extra"):
            yield from _leaves(state[kind], f"{each.name}.")
        yield f"{each.name}: modules in eval mode", state["eval"]
        yield f"{each.name}: frozen parameters", state["frozen"]
        yield f"{each.name}: parameters with a gradient of zero", state["zeroed"]
    elif isinstance(each, OptimizerPart):
        owners = [
            parameters.get(id(one), f"parameter {i}") for i, one in enumerate(each.parameters())
        ]
        for key, inner in state["state"].items():
            owner = owners[key] if isinstance(key, int) and key < len(owners) else str(key)
            yield from _leaves(inner, f"{each.name} of {owner}: ")
        for number, group in enumerate(state["groups"]):
            yield from _leaves(group, f"{each.name}, group {number}: ")
    else:
        yield from _leaves(state, f"{each.name}: ")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what is in a tree: tensors, and whatever has none in it as a whole.

    >>> dict(_leaves({"lr": [1, 2], "inner": {"a": 3}}, "x: "))
    {'x: lr': [1, 2], 'x: inner.a': 3}
    """
    inner: Iterator[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        inner = iter(value.items())
    elif isinstance(value, (list, tuple)) and any(map(_is_deep, value)):
        inner = iter(enumerate(value))
    if inner is None:
        yield path.removesuffix(".").removesuffix(": "), value
        return
    for key, each in inner:
        yield from _leaves(each, f"{path}{key}.")


def _is_deep(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, torch.Tensor))


def _hash(data: bytes, meaning: str = "") -> str:
    return xxhash.xxh3_64_hexdigest(meaning.encode() + data)
