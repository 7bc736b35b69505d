"""A tensor's memory, without `Tensor.numpy()`.

`numpy()` marks a storage as not resizable, which breaks FSDP and others; a buffer over the data
pointer does not.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable. The view keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
