"""Sharded tensors: what of a `DTensor` a rank holds itself, and where that lies in the whole.

FSDP2, tensor parallelism and `distribute_module` leave each rank a plain local tensor. That is what
is captured, handed over and compared; no method of the `DTensor` is called on the way, since most
would communicate.
"""

from __future__ import annotations

import sys
from typing import Any, overload

import torch

from tmover.errors import StateError


def is_sharded(value: Any) -> bool:
    """Return whether a value is a `DTensor`, be it replicated."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported, there can be none
    return module is not None and isinstance(value, module.DTensor)


def is_fsdp(module: torch.nn.Module) -> bool:
    """Return whether a module is one of FSDP2's."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@overload
def local(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def local(tensor: None) -> None: ...
def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return what this rank holds of a tensor: the tensor itself, unless it is sharded."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[union-attr]


def kind(tensor: torch.Tensor) -> list[Any]:
    """Return what must be the same on another rank for its tensor to fit here."""
    own = local(tensor)
    found: list[Any] = [str(own.dtype), list(own.shape)]
    if is_sharded(tensor):
        whole: Any = tensor
        ways = [str(placement) for placement in whole.placements]
        found += [list(whole.shape), list(whole.device_mesh.shape), ways]
    return found


def place(tensor: torch.Tensor) -> list[int]:
    """Return which part this rank holds: its number along each dimension of the mesh that shards.

    Where the tensor is replicated it is 0, so that ranks with equal parts say the same.
    """
    if not is_sharded(tensor):
        return []
    whole: Any = tensor
    coordinate = whole.device_mesh.get_coordinate() or []
    pairs = zip(coordinate, whole.placements, strict=True)
    return [0 if placement.is_replicate() else number for number, placement in pairs]


def chunk(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the size of the whole tensor, and where in it this rank's part begins."""
    size = tuple(tensor.shape)
    if not is_sharded(tensor):
        return size, (0,) * len(size)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = tensor
    _, offset = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    return size, tuple(offset)


def refuse_misplaced(tensor: torch.Tensor, path: str) -> None:
    """Raise `StateError` if a process that has become another rank has no room for its part."""
    if not is_sharded(tensor):
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = tensor
    wanted, _ = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements, skip_offset=True
    )
    shape = local(tensor).shape
    if tuple(wanted) != tuple(shape):
        msg = (
            f"{path} is split unevenly: this process has room for a part of {list(shape)}, and has "
            f"become a rank whose part is {list(wanted)}"
        )
        raise StateError(msg)


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return `part` as this rank's part of a tensor that is sharded as `tensor` is."""
    from torch.distributed.tensor import DTensor

    whole: Any = tensor
    return DTensor.from_local(
        part,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
