"""What a rank writes of a checkpoint, tensor by tensor: under which name, and where in the whole.

Names are those of the script: `model.0.weight` for a module's tensor, `optimizer.state.3.exp_avg`
for what an optimizer holds of its parameter number 3. Buffers that are no part of a module's
`state_dict` are left out: what the script has made is right, or they are in the rank's own record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import xxhash

from tmover.state import shards, tree
from tmover.state.capture import Header, Tracked
from tmover.state.memory import Layout
from tmover.state.parts import ModulePart, OptimizerPart, Part


class Piece(NamedTuple):
    """A tensor of what is tracked, or a rank's part of one."""

    key: str
    size: tuple[int, ...]
    """Of the whole tensor that it is a part of."""
    offset: tuple[int, ...]
    """Where in it this rank's part begins."""
    is_part: bool
    """Whether it is a `DTensor`'s."""
    is_updated: bool
    """Whether it is a parameter, or an optimizer's: replicas hold the same."""

    def writer(self, members: list[int]) -> int:
        """Return who of several ranks that hold the same writes it."""
        if not self.is_updated:
            return members[0]
        return members[xxhash.xxh3_64_intdigest(self.key.encode()) % len(members)]


def described(tracked: Tracked, parts: dict[str, Any]) -> list[Piece]:
    """Return the tensors of a packed state, by their numbers."""
    found: dict[int, Piece] = {}
    taken: set[str] = set()
    for name, each in tracked.parts(per_rank=False).items():
        owners = _owners(each)
        for path, ref in tree.references(tree.unpack(parts[name])):
            if ref.number not in found:
                key = _key(name, each, path)
                while key in taken:
                    key += "'"
                taken.add(key)
                found[ref.number] = _piece(key, each, path, owners.get(path[:2]))
    return [found[number] for number in range(len(found))]


def kept(tracked: Tracked, header: Header) -> tuple[Header, list[int]]:
    """Return the header without what a checkpoint leaves out, and the old numbers of the rest."""
    trees = {name: tree.unpack(packed) for name, packed in header.parts.items()}
    for name, each in tracked.parts(per_rank=False).items():
        if isinstance(each, ModulePart):
            for key in each.transient() & trees[name]["buffers"].keys():
                del trees[name]["buffers"][key]
    numbers: dict[int, int] = {}
    for value in trees.values():
        for _, ref in tree.references(value):
            numbers.setdefault(ref.number, len(numbers))
    parts = {
        name: tree.pack(renumbered(value, numbers), tree.Tensors()) for name, value in trees.items()
    }
    return Header(tuple(header.layouts[old] for old in numbers), parts), list(numbers)


def renumbered(value: Any, numbers: dict[int, int]) -> Any:
    """Return a tree with other numbers for its tensors."""
    if isinstance(value, tree.Ref):
        return tree.Ref(numbers[value.number])
    if isinstance(value, dict):
        items = [(key, renumbered(inner, numbers)) for key, inner in value.items()]
        return type(value)(dict(items))
    if type(value) in (list, tuple):
        return type(value)(renumbered(inner, numbers) for inner in value)
    return value


def reseated(tracked: Tracked, header: Header, sizes: dict[int, tuple[int, ...]]) -> Header:
    """Return the header of another rank's state as it is for this one, which holds other parts.

    `sizes`: of the whole tensors, by number.
    """
    layouts = list(header.layouts)
    trees = {name: tree.unpack(packed) for name, packed in header.parts.items()}
    for name, each in tracked.parts(per_rank=False).items():
        mine = trees.get(name)
        if isinstance(each, ModulePart) and isinstance(mine, dict):
            for owner, ref in _of_module(each, mine):
                layouts[ref.number] = _like(layouts[ref.number], shards.local(owner))
        elif isinstance(each, OptimizerPart) and isinstance(mine, dict):
            for state, key, ref, owner in _of_optimizer(each, mine):
                is_like_it = sizes.get(ref.number) == tuple(owner.shape)
                if is_like_it:
                    layouts[ref.number] = _like(layouts[ref.number], shards.local(owner))
                state[key] = (ref,) if is_like_it and shards.is_sharded(owner) else ref
    parts = {name: tree.pack(value, tree.Tensors()) for name, value in trees.items()}
    return Header(tuple(layouts), parts)


def _of_module(each: ModulePart, mine: dict[str, Any]) -> Iterator[tuple[torch.Tensor, tree.Ref]]:
    for kind, owners in (("parameters", each.parameters()), ("buffers", each.buffers())):
        for key, ref in mine[kind].items():
            if key in owners:
                yield owners[key], ref


def _of_optimizer(
    each: OptimizerPart, mine: dict[str, Any]
) -> Iterator[tuple[dict[Any, Any], Any, tree.Ref, torch.Tensor]]:
    parameters = each.parameters()
    for number, state in mine["state"].items():
        known = isinstance(number, int) and number < len(parameters)
        for key, value in list(state.items()) if known and isinstance(state, dict) else ():
            ref = value[0] if type(value) is tuple and len(value) == 1 else value
            if isinstance(ref, tree.Ref):
                yield state, key, ref, parameters[number]


def _like(layout: Layout, tensor: torch.Tensor) -> Layout:
    """Return the layout with the shape of a tensor."""
    shape = tuple(tensor.shape)
    order = layout.order if len(layout.order) == len(shape) else tuple(range(len(shape)))
    return Layout(layout.dtype, shape, order, layout.device)


_PART = 4
"""How long the path of a part of an optimizer's tensor is: state, number, name, and 0."""


def _key(name: str, each: Part, path: tree.Path) -> str:
    if isinstance(each, ModulePart) and path[0] in ("parameters", "buffers"):
        path = path[1:]
    elif isinstance(each, OptimizerPart) and path[0] == "state" and len(path) == _PART:
        path = path[:3]
    return ".".join(map(str, (name, *path)))


def _owners(each: Part) -> dict[tree.Path, torch.Tensor]:
    """Return what says how the tensors of a state are split, by the beginning of their paths."""
    if isinstance(each, ModulePart):
        parameters = {("parameters", key): p for key, p in each.parameters().items()}
        return {**parameters, **{("buffers", key): b for key, b in each.buffers().items()}}
    if isinstance(each, OptimizerPart):
        return {("state", number): p for number, p in enumerate(each.parameters())}
    return {}


def _piece(key: str, each: Part, path: tree.Path, owner: torch.Tensor | None) -> Piece:
    is_updated = isinstance(each, OptimizerPart) or (
        isinstance(each, ModulePart) and path[0] == "parameters"
    )
    is_part = owner is not None and shards.is_sharded(owner)
    if isinstance(each, OptimizerPart):
        is_part = is_part and len(path) == _PART
    if owner is None or not is_part:
        return Piece(key, (), (), is_part=False, is_updated=is_updated)
    size, offset = shards.chunk(owner)
    return Piece(key, size, offset, is_part=True, is_updated=is_updated)
