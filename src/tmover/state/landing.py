"""Where a captured state goes on the rank that receives it.

A `Landing` says which live tensors the bytes are for, makes those that do not exist yet (an
optimizer's state is made lazily), and attaches them once everything has come and was verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from tmover.errors import StateError
from tmover.state import memory, tree
from tmover.state.capture import Header, Tracked
from tmover.state.memory import Layout
from tmover.state.parts import ModulePart, OptimizerPart, Part

_decoder = msgspec.msgpack.Decoder(Header)


class Places:
    """The tensor that takes the bytes of each tensor of a state; several trees may share them."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._found: dict[int, torch.Tensor] = {}
        self._taken: set[int] = set()

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._found[index]

    def indices(self) -> list[int]:
        """Return which tensors have a place."""
        return sorted(self._found)

    def find(self, each: Part, incoming: Any) -> None:
        """Find a place for every tensor of a tree: the part's own where it fits, else a new one.

        Raises `StateError` naming a tensor that must exist and does not, or is another one.
        """
        live = each.tree()
        for path, ref in tree.references(incoming):
            if ref.number >= len(self._layouts):
                msg = f"state header refers to tensor {ref.number} of {len(self._layouts)}"
                raise StateError(msg)
            self._place(each, path, ref.number, _at(live, path))

    def _place(self, each: Part, path: tuple[Any, ...], number: int, mine: Any) -> None:
        described, found = self._layouts[number], self._found.get(number)
        if mine is not None and mine is found:
            return
        device = each.device(path, described)
        free = isinstance(mine, torch.Tensor) and id(mine) not in self._taken
        if found is None and free and described.fits(mine):
            found = mine
        elif device is None:
            msg = f"tracked `{each.name}`: {'.'.join(map(str, path))} is another tensor here"
            raise StateError(msg)
        elif found is None:
            found = memory.allocate(described, device)
        self._found[number] = found
        self._taken.add(id(found))


class Landing:
    """A state on its way in."""

    def __init__(self, tracked: Tracked, header: bytes | bytearray) -> None:
        """Find places. Raises `StateError` if the header is damaged, or of something else."""
        decoded = _decoded(header)
        self.layouts = decoded.layouts
        self.alike = frozenset(decoded.alike)
        self._tracked = tracked
        self._packed = decoded.parts
        self._newer = decoded.newer
        self._parts = tracked.parts(per_rank=False)
        if self._parts.keys() != decoded.parts.keys():
            msg = f"state of {sorted(decoded.parts)} came for {sorted(self._parts)}"
            raise StateError(msg)
        self._places = Places(self.layouts)
        for name, each in self._parts.items():
            self._places.find(each, tree.unpack(self._packed[name]))
        if len(self._places.indices()) != len(self.layouts):
            msg = "state header describes tensors that nothing refers to"
            raise StateError(msg)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Where the bytes go, in the order of `layouts`."""
        return [self._places[index] for index in range(len(self.layouts))]

    @property
    def is_remote(self) -> bool:
        """Whether any of them is on a device."""
        return any(layout.device != "cpu" for layout in self.layouts)

    def adopt(self) -> None:
        """Attach what was received: to be called once, when every byte is verified and in place."""
        tensors = self.tensors
        with torch.no_grad():
            for name in sorted(self._parts, key=lambda name: _turn(self._parts[name])):
                self._parts[name].adopt(tree.unpack(self._packed[name], tensors))
        self._tracked.buffers.rebase()
        self._tracked.newer = frozenset(self._newer)


def layouts_of(header: bytes) -> tuple[Layout, ...]:
    """Return what tensors a header describes. Raises `StateError` if it is damaged."""
    return _decoded(header).layouts


def _decoded(header: bytes | bytearray) -> Header:
    try:
        decoded = _decoder.decode(header)
    except (msgspec.DecodeError, RecursionError) as error:
        msg = f"state header cannot be read: {error}"
        raise StateError(msg) from error
    for described in decoded.layouts:
        described.check()
    return decoded


def _turn(each: Part) -> int:
    """Modules first; optimizers last, so that no scheduler's load can change their numbers."""
    if isinstance(each, ModulePart):
        return 0
    return 2 if isinstance(each, OptimizerPart) else 1


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value
