"""Module buffers: which of them differ by rank, and what they were when the step opened.

Batch norm's running statistics follow the rank's own samples, so a dead rank's are nobody else's. A
buffer *varies* once it was seen with another value than it had when tracking began; only those are
kept on another node. Torch's version counter says where to look, but the statistics of batch norm
change without counting (measured on 2.13), so one counted change in a module is a reason to look
at all of its buffers. What a script writes through `.data` is not counted either: all values are
compared in the first steps, and ever more rarely later, and what was seen to change without being
counted is compared in every step from then on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set

import torch
from torch import nn

from tmover.errors import StateError
from tmover.state import memory, shards


@dataclasses.dataclass(slots=True)
class _Buffer:
    """One buffer: where it hangs, what was there at the last `refresh`, and a copy of its value."""

    name: str
    """The tracked name."""
    key: str
    slots: dict[str, torch.Tensor | None]
    leaf: str
    live: torch.Tensor | None
    version: int
    copy: torch.Tensor | None
    varies: bool = False
    silent: bool = False
    """Whether it was seen to change in a module where nothing was counted."""

    @property
    def now(self) -> torch.Tensor | None:
        """What hangs there now; of what is sharded, this rank's part."""
        return shards.local(self.slots.get(self.leaf))

    @property
    def counted(self) -> bool:
        """Whether a change since the last `refresh` was counted, or would not be."""
        return self.silent or self.now is not self.live or _version(self.live) != self.version

    @property
    def differs(self) -> bool:
        """Whether it has another value than its copy."""
        now = self.now
        if now is None or self.copy is None:
            return now is not self.copy
        same_kind = now.shape == self.copy.shape and now.dtype == self.copy.dtype
        return not same_kind or not _equal(now, self.copy)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one kind hold the same values; NaN is the same as NaN."""
    if torch.equal(a, b):
        return True
    inexact = a.is_floating_point() or a.is_complex()
    return inexact and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


_LOOKS = 4
"""In how many first steps all buffers are compared; later, as it costs, in every power of two."""


class Buffers:
    """The buffers of all tracked modules."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, nn.Module]] = []
        self._replicated: set[str] = set()
        self._groups: list[list[_Buffer]] = []
        """By the module they hang on."""
        self._slots: list[dict[str, torch.Tensor | None]] = []
        self._count = 0
        self._refreshed = 0
        self._looking = True
        """Whether all values are compared in this step."""

    def add(self, name: str, module: nn.Module, *, replicated: bool = True) -> None:
        """Look after the buffers of `module`; `varying` names them only if it is replicated."""
        self._modules.append((name, module))
        if replicated:
            self._replicated.add(name)
        self._scan()

    def _scan(self) -> None:
        """Find buffers that were registered since the last time."""
        known = {id(slots) for slots in self._slots}
        leaves = {(id(b.slots), b.leaf) for group in self._groups for b in group}
        held = {id(b.live) for group in self._groups for b in group if b.live is not None}
        for name, module in self._modules:
            for prefix, owner in module.named_modules():
                slots = owner._buffers
                if id(slots) not in known:
                    self._slots.append(slots)
                    known.add(id(slots))
                group: list[_Buffer] = []
                for leaf, whole in slots.items():
                    live = shards.local(whole)
                    if (id(slots), leaf) not in leaves and id(live) not in held:
                        group.append(_buffer(name, prefix, slots, leaf))
                        held.update({id(live)} if live is not None else ())
                leaves.update((id(slots), leaf) for leaf in slots)
                if group:
                    self._groups.append(group)
        self._count = self._total()

    def _total(self) -> int:
        return sum(map(len, self._slots))

    def _touched(self) -> Iterator[_Buffer]:
        for group in self._groups:
            if any(buffer.counted for buffer in group):
                yield from group
            elif self._looking and any(buffer.differs for buffer in group):
                for buffer in group:
                    buffer.silent = buffer.differs
                yield from group

    def refresh(self) -> None:
        """Take today's values as those to go back to."""
        turn = self._refreshed = self._refreshed + 1
        self._looking = turn <= _LOOKS or turn & (turn - 1) == 0
        if self._total() != self._count:
            self._scan()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer in self._touched():
            if buffer.varies or buffer.differs:
                buffer.varies = True
                _recopy(buffer, pairs)
            buffer.live = buffer.now
            buffer.version = _version(buffer.live)
        _copy_all(pairs)

    def restore(self) -> None:
        """Put back the values of the last `refresh`, into the tensors that were there then.

        Raises `StateError` if one changed that nobody was looking at: nobody knows what it was.
        """
        self._refuse_unseen()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        touched = list(self._touched())
        for buffer in touched:
            if buffer.now is not buffer.live:
                buffer.slots[buffer.leaf] = buffer.live
            if buffer.live is not None and buffer.copy is not None and buffer.differs:
                pairs.append((buffer.live, buffer.copy))
        _copy_all(pairs)
        for buffer in touched:
            buffer.version = _version(buffer.live)

    def _refuse_unseen(self) -> None:
        known = {id(buffer) for buffer in self._touched()}
        for buffer in (buffer for group in self._groups for buffer in group):
            if id(buffer) not in known and buffer.differs:
                msg = (
                    f"tracked `{buffer.name}`: buffer `{buffer.key}` was written through `.data` "
                    "for the first time after many steps, so its value when the step opened is "
                    "not known: write it with copy_() under torch.no_grad()"
                )
                raise StateError(msg)

    def varying(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the live buffers that differ, or may differ, by rank: by tracked name and key."""
        for buffer in self._touched():
            buffer.varies = buffer.varies or buffer.differs
        found: dict[str, dict[str, torch.Tensor]] = {}
        for group in self._groups:
            for buffer in group:
                if buffer.varies and buffer.now is not None and buffer.name in self._replicated:
                    found.setdefault(buffer.name, {})[buffer.key] = buffer.now
        return found

    def rebase(self) -> None:
        """Forget which vary: all of them were just received from another rank."""
        self._scan()
        for group in self._groups:
            for buffer in group:
                buffer.varies = False
                _renew(buffer)

    def apply(
        self,
        values: Mapping[str, Mapping[str, torch.Tensor]],
        *,
        newer: Set[str] = frozenset(),
    ) -> None:
        """Set buffers that vary, except those named in `newer`, which vary too but are right.

        Raises `StateError` if there is no such buffer here.
        """
        index = {(b.name, b.key): b for group in self._groups for b in group}
        for name, inner in values.items():
            for key, value in inner.items():
                buffer = index.get((name, key))
                if buffer is None:
                    msg = f"tracked `{name}` has no buffer `{key}` here"
                    raise StateError(msg)
                buffer.varies = True
                if f"{name}.{key}" not in newer:
                    _set(buffer, value)


def _buffer(name: str, prefix: str, slots: dict[str, torch.Tensor | None], leaf: str) -> _Buffer:
    live = shards.local(slots[leaf])
    return _Buffer(
        name=name,
        key=f"{prefix}.{leaf}" if prefix else leaf,
        slots=slots,
        leaf=leaf,
        live=live,
        version=_version(live),
        copy=_clone(live),
    )


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _renew(buffer: _Buffer) -> None:
    buffer.live = buffer.now
    buffer.version = _version(buffer.live)
    buffer.copy = _clone(buffer.live)


def _recopy(buffer: _Buffer, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Bring the copy up to date: through `pairs` if it has the right shape already."""
    now, copy = buffer.now, buffer.copy
    fits = now is not None and copy is not None
    if fits and now.shape == copy.shape and now.dtype == copy.dtype:  # type: ignore[union-attr]
        pairs.append((copy, now))  # type: ignore[arg-type]
    else:
        buffer.copy = _clone(now)


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


def _set(buffer: _Buffer, value: torch.Tensor) -> None:
    mine = buffer.now
    with torch.no_grad():
        if mine is not None and mine.shape == value.shape and mine.dtype == value.dtype:
            memory.put(mine, value)
        else:
            device = value.device if mine is None else mine.device
            buffer.slots[buffer.leaf] = value.to(device)
    _renew(buffer)
