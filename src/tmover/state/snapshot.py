"""What an attempt at a step may change before its vote, and how to go back.

Taken when a step opens, put back when the step is done again: random number streams, module
buffers, modes, what is frozen, the numbers of optimizer groups, and every tracked object that is
neither module nor optimizer. Parameters and optimizer tensors change only after a passed vote and
are not copied; of parameters `refuse_updates` makes sure. Gradients go back to what they were, none
or zero.
"""

from __future__ import annotations

from typing import Any

import torch

from tmover.errors import StateError
from tmover.state import rng, tree
from tmover.state.capture import Tracked
from tmover.state.generations import Copying
from tmover.state.parts import ModulePart, ObjectPart, OptimizerPart, zero_gradient
from tmover.state.records import Record
from tmover.state.untouched import Untouched

_LARGE_BYTES = 1 << 20
"""Tensors of tracked objects from this size on are not copied at every step."""
_CLOSE_LOOKS = 3
"""In how many first steps it is checked that parameters do not change through `.data` either."""


class _Kept:
    """A tensor's value: a copy, or the tensor itself if it is large and must not change."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._large = tensor.numel() * tensor.element_size() >= _LARGE_BYTES
        self._tensor = tensor.detach() if self._large else tensor.detach().clone()
        self._version = self._tensor._version

    def fresh(self, path: str) -> torch.Tensor:
        """Return a copy of the value. Raises `StateError` if it was not copied and has changed."""
        if self._tensor._version != self._version:
            msg = (
                f"{path} holds a large tensor that changed before the vote; it is not copied at "
                "every step: change it after optimizer.step(), or keep it in a module's buffer"
            )
            raise StateError(msg)
        return self._tensor.clone()


class _Packed:
    """A tree as bytes and its tensors' values, from which it can be made afresh many times."""

    def __init__(self, value: Any, path: str) -> None:
        tensors = tree.Tensors()
        self._path = path
        self._data = tree.encode(tree.pack(value, tensors, path))
        self._tensors = [_Kept(tensor) for tensor in tensors.held]

    def fresh(self) -> Any:
        """Return the tree, sharing nothing with any other."""
        tensors = [kept.fresh(self._path) for kept in self._tensors]
        return tree.unpack(tree.decode(self._data), tensors)


class Snapshot:
    """A step's opening. Only the latest snapshot of what is tracked can be restored."""

    def __init__(
        self, tracked: Tracked, *, streams: bytes | None = None, whole: bool = False
    ) -> None:
        """Take it. `streams` spares capturing the random streams; `whole` makes updates undoable.

        A whole one must be told by `hold_still` before an update.
        """
        self._whole = Copying(tracked, step=0, record=b"") if whole else None
        parts = tracked.every_part()
        tracked.buffers.refresh()
        tracked.snapshots += 1
        self._serial = tracked.snapshots
        self._streams = rng.capture() if streams is None else streams
        self._objects = [
            (each, _Packed(each.tree(), f"tracked `{each.name}`: state_dict()"))
            for each in parts
            if isinstance(each, ObjectPart)
        ]
        self._groups = [
            (each, _Packed(each.groups(), f"tracked `{each.name}`: param_groups"))
            for each in parts
            if isinstance(each, OptimizerPart)
        ]
        self._extras = [
            (each, _Packed(each.extra(), f"tracked `{each.name}`: state_dict()"))
            for each in parts
            if isinstance(each, ModulePart) and each.has_extra
        ]
        modules = (m for each in parts if isinstance(each, ModulePart) for m in each.modules)
        self._modes = [(module, module.training) for module in modules]
        parameters = tracked.parameters()
        self._gradients = [(p, p.grad is not None) for p in parameters]
        self._trained = [(p, p.requires_grad) for p in parameters]
        self._untouched = Untouched(parameters, closely=self._serial <= _CLOSE_LOOKS)

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter had a gradient when the step opened, be it zero."""
        return any(present for _, present in self._gradients)

    def hold_still(self) -> None:
        """Copy what an update is about to change, if it is to be undoable."""
        if self._whole is not None:
            self._whole.finish()

    def refuse_updates(self, tracked: Tracked) -> None:
        """Raise `StateError` if a parameter changed: doing the step again would do it twice."""
        if self._whole is not None:
            return
        changed = self._untouched.changed()
        if changed is not None:
            msg = (
                f"{tracked.name_of(changed)} changed inside `with step` before optimizer.step(): a "
                "step that is done again would change it twice; leave updates to an optimizer, "
                "and move what else changes parameters (averaging, clamping) behind its step()"
            )
            raise StateError(msg)

    def restore(self, tracked: Tracked) -> None:
        """Go back, any number of times.

        Raises `StateError` if a later snapshot was taken, or parameters have changed.
        """
        if self._serial != tracked.snapshots:
            msg = "a later snapshot was taken; only the latest can be restored"
            raise StateError(msg)
        self.refuse_updates(tracked)
        if self._whole is not None:
            before = self._whole.finish()
            before.restore(tracked)
            Record.decode(before.record).restore_private(tracked)
        with torch.no_grad():
            tracked.buffers.restore()
            for module, training in self._modes:
                module.training = training
            for parameter, trained in self._trained:
                parameter.requires_grad = trained
            for each, packed in self._objects:
                each.adopt(packed.fresh())
                _forget_scaling(each.obj)
            for optimizer, packed in self._groups:
                optimizer.adopt_groups(packed.fresh())
            for module, packed in self._extras:
                module.adopt_extra(packed.fresh())
            for parameter, present in self._gradients:
                zero_gradient(parameter, present=present)
        rng.restore(self._streams)


def _forget_scaling(obj: object) -> None:
    """Let a loss scaler forget which optimizers the broken attempt has unscaled already."""
    stages = getattr(obj, "_per_optimizer_states", None)
    if isinstance(stages, dict):
        stages.clear()
