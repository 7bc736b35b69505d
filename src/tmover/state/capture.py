"""What a rank tracks, by name, and its state as one message: a header and live tensors.

The header is a msgpack tree with references in place of tensors; the tensors are the live ones, not
copies. `landing` is the other side.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from tmover.errors import StateError
from tmover.state import extras, memory, shards, shares, tree
from tmover.state.buffers import Buffers
from tmover.state.memory import Layout
from tmover.state.parts import ExtraPart, ModulePart, OptimizerPart, Part, StreamPart, part

_SAMPLED = 4
"""About how many parameters are looked at to see whether replicas are still replicas."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a capture holds beside the bytes of its tensors."""

    layouts: tuple[Layout, ...]
    parts: dict[str, Any]
    """By tracked name, as made by `tree.pack`."""
    newer: tuple[str, ...] = ()
    """Varying buffers that changed after the vote; no record of that vote has their value."""
    alike: tuple[int, ...] = ()
    """The numbers of tensors that every replica holds alike, if several of them send."""


class Captured(NamedTuple):
    """A rank's replicated state: valid until anything tracked changes."""

    header: bytes
    tensors: list[torch.Tensor]
    layouts: tuple[Layout, ...]
    alike: frozenset[int] = frozenset()
    """The numbers of tensors that every replica of this rank holds alike: if several send them."""
    sources: int = 1
    """How many of them send."""
    sample: bytes = b""
    """A hash by which replicas know each other."""


class Tracked:
    """The registry of what is handed over."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._private: set[str] = set()
        self.buffers = Buffers()
        self.newer: frozenset[str] = frozenset()
        """What was received as it is after the step it stands at, as records of that vote have it
        not: to be forgotten when another step is applied."""
        self.role = ""
        """What the script calls the ranks that build the same as this one, "" if nothing."""
        self.snapshots = 0
        """How many were taken: only the latest can be restored."""
        self._chosen: list[torch.Tensor] = []
        """The parameters that are looked at in a sample."""

    def track(self, name: str, obj: object, *, per_rank: bool = False) -> None:
        """Register `obj` under `name`; with `per_rank`, as something that no other rank holds too.

        A random generator always is: ranks that draw alike today may not tomorrow. Raises
        `StateError` if its state holds anything but plain values, naming the path.
        """
        if name in self._parts:
            msg = f"`{name}` is tracked already"
            raise StateError(msg)
        new = part(name, obj)
        self._add(new, private=per_rank or isinstance(new, StreamPart))
        if isinstance(new, ModulePart):
            self.buffers.add(name, new.module, replicated=not per_rank)
            if extra := extras.Extra(new.module):
                self._add(ExtraPart(name, extra), private=True)

    def _add(self, new: Part, *, private: bool) -> None:
        packed = tree.pack(new.tree(), tree.Tensors(), self._root(new))
        tree.encode([packed, tree.pack(new.schema(), tree.Tensors())])
        self._parts[new.name] = new
        self._chosen = []
        if private:
            self._private.add(new.name)

    @staticmethod
    def _root(owner: Part) -> str:
        return f"tracked `{owner.name}`: state_dict()"

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def parts(self, *, per_rank: bool) -> dict[str, Part]:
        """Return what is replicated, or what is not, by name."""
        return {k: v for k, v in self._parts.items() if (k in self._private) is per_rank}

    def every_part(self) -> list[Part]:
        """Return all parts."""
        return list(self._parts.values())

    def parameters(self) -> list[torch.Tensor]:
        """Return every parameter of tracked modules and optimizers, once."""
        found: dict[int, torch.Tensor] = {}
        for each in self._parts.values():
            if isinstance(each, ModulePart):
                found.update((id(p), p) for p in each.bare_parameters())
            elif isinstance(each, OptimizerPart):
                found.update((id(p), p) for p in each.parameters())
        return list(found.values())

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return what to call a tracked parameter in a message."""
        for each in self._parts.values():
            for key, mine in each.parameters().items() if isinstance(each, ModulePart) else ():
                if mine is parameter:
                    return f"tracked `{each.name}`: parameter `{key}`"
        return f"a parameter of shape {list(parameter.shape)}"

    def refuse_hooks_with_state(self) -> None:
        """Raise `StateError` for a DDP communication hook whose state no joiner would have."""
        for each in self._parts.values():
            if isinstance(each, ModulePart) and (hook := each.hook_with_state()):
                msg = (
                    f"tracked `{each.name}` has a communication hook with a state of its own, "
                    f"`{hook}`: it cannot be handed over; use one without state, or none"
                )
                raise StateError(msg)

    def holds(self, obj: object) -> bool:
        """Return whether `obj` itself is tracked."""
        return any(each.target is obj for each in self._parts.values())

    def has_gradients(self) -> bool:
        """Return whether a parameter has a gradient that is not zero."""
        found = [shards.local(p.grad) for p in self.parameters() if p.grad is not None]
        gradients = [g.coalesce().values() if g.is_sparse else g for g in found]
        return bool(gradients) and any(map(bool, torch._foreach_norm(gradients, math.inf)))

    def schema(self) -> dict[str, str]:
        """Return a digest by name of what must be equal for a state to fit after a rebinding."""
        return {name: self._digest(name, each.schema()) for name, each in self._parts.items()}

    def seat(self) -> dict[str, str]:
        """Return a digest by name of what must be equal for a state to fit as it is.

        That is the schema, and which part of what is sharded this rank holds.
        """
        return {
            name: self._digest(name, [each.schema(), each.place()])
            for name, each in self._parts.items()
        }

    def _digest(self, name: str, facts: Any) -> str:
        packed = tree.pack(facts, tree.Tensors())
        return hashlib.sha256(tree.encode([name in self._private, packed])).hexdigest()

    def refuse_misplaced(self) -> None:
        """Raise `StateError` if a process that has become another rank has no room for its part."""
        for each in self._parts.values():
            for key, parameter in each.parameters().items() if isinstance(each, ModulePart) else ():
                shards.refuse_misplaced(parameter, f"tracked `{each.name}`: parameter `{key}`")

    def holdings(self) -> bytes:
        """Return a hash of parameters and optimizer state: the same on replicas of this rank."""
        total = xxhash.xxh3_128()
        for name, each in self.parts(per_rank=False).items():
            if isinstance(each, ModulePart | OptimizerPart):
                state = each.tree()["parameters" if isinstance(each, ModulePart) else "state"]
                tensors = tree.Tensors()
                packed = tree.pack(state, tensors, self._root(each))
                total.update(tree.encode([name, self._digest(name, each.place()), packed]))
                for tensor in tensors.held:
                    total.update(memory.copy_out([tensor])[0])
        return total.digest()

    def sample(self, like: int = 0) -> bytes:
        """Return a hash of a few values, by which replicas that have parted show it at once.

        It is made in every vote: some parameters, their gradients, by which the update they part
        in is known before it is made, and what optimizers hold for them. `like` is the rank that it
        held the same as so far.
        """
        if not self._chosen:
            parameters = self.parameters()
            self._chosen = parameters[:: max(1, len(parameters) // _SAMPLED)]
        found: list[Any] = [*self._chosen, *(p.grad for p in self._chosen)]
        for each in self._parts.values():
            if isinstance(each, OptimizerPart):
                live = each.states
                found += [v for p in self._chosen for v in _values(live.get(p))]
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for value in found:
            tensor = shards.local(value)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                cell = tensor.detach()[tuple(size // 2 for size in tensor.shape)]
                alike.setdefault((cell.device, cell.dtype), []).append(cell)
        total = xxhash.xxh3_128(like.to_bytes(4, "big"))
        for cells in alike.values():
            total.update(memory.view(torch.stack(cells).cpu()))
        return total.digest()

    def digest(self) -> str:
        """Return a SHA-256 over everything tracked: equal exactly if all values are, to the bit."""
        total = hashlib.sha256()
        for name in sorted(self._parts):
            each = self._parts[name]
            tensors = tree.Tensors()
            packed = tree.pack(each.tree(), tensors, self._root(each))
            total.update(tree.encode([name, canonical(packed, [_hash(t) for t in tensors.held])]))
        return total.hexdigest()

    def pack(self, each: Part, tensors: tree.Tensors) -> Any:
        """Return one part's state packed, its tensors added to `tensors`."""
        return tree.pack(each.tree(), tensors, self._root(each))


def _values(state: Any) -> Collection[Any]:
    return state.values() if isinstance(state, dict) else ()


def _hash(tensor: torch.Tensor) -> list[Any]:
    data = memory.view(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]


def canonical(packed: Any, hashes: list[Any]) -> Any:
    """Return a packed tree with hashes for tensors, and the items of dicts sorted.

    The order of a dict is history, not state: optimizers make their state in any order.
    """
    if not isinstance(packed, list):
        return packed
    tag, *rest = packed
    if tag in tree.DICT_TAGS:
        items = [[key, canonical(value, hashes)] for key, value in rest[0]]
        return [tag, sorted(items, key=lambda item: tree.encode(item[0]))]
    if tag in tree.SEQUENCE_TAGS:
        return [tag, [canonical(value, hashes) for value in rest[0]]]
    return [tag, hashes[rest[0]]] if tag == "tensor" else packed


def mismatch(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Return the tracked names in which two schemas differ."""
    return sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))


def capture(tracked: Tracked, *, newer: Sequence[str] = (), sources: int = 1) -> Captured:
    """Return the replicated state. Nothing is copied: keep still until it was sent.

    `newer` names the buffers that this rank changed since its own record was made. `sources` ranks
    hold it and could each send a part.
    """
    tensors = tree.Tensors()
    whole = tracked.parts(per_rank=False)
    parts = {k: tracked.pack(each, tensors) for k, each in whole.items()}
    layouts = tuple(memory.layout(tensor) for tensor in tensors.held)
    size = sum(layout.size_bytes for layout in layouts)
    taking_part = shares.sources_for(size, sources)
    if taking_part == 1:
        header = msgspec.msgpack.encode(Header(layouts, parts, tuple(newer)))
        return Captured(header=header, tensors=tensors.held, layouts=layouts)
    alike = frozenset(number for k in whole for number in _alike(whole[k], parts[k]))
    return Captured(
        header=msgspec.msgpack.encode(Header(layouts, parts, tuple(newer), tuple(sorted(alike)))),
        tensors=tensors.held,
        layouts=layouts,
        alike=alike,
        sources=taking_part,
        sample=tracked.sample(),
    )


def _alike(each: Part, packed: Any) -> Iterator[int]:
    """Yield the tensors of a part that are the same on every replica: by their numbers."""
    if isinstance(each, ModulePart | OptimizerPart):
        same = "parameters" if isinstance(each, ModulePart) else "state"
        for path, ref in tree.references(tree.unpack(packed)):
            if path[0] == same:
                yield ref.number
