"""The bytes of a tensor, in the order in which they are sent.

`Cells` reads and writes ranges of a tensor's bytes in logical order, whatever its strides and
device: straight from memory where it can, through a bounded staging area otherwise.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tmover.errors import StateError
from tmover.memory import view as view

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_NAMES = {value: name for name, value in DTYPES.items()}


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What a tensor's bytes mean."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions from the slowest to the fastest: the order in which the bytes are sent."""
    device: str
    """The kind of device it lives on."""

    @property
    def size_bytes(self) -> int:
        """How many bytes are sent."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def check(self) -> None:
        """Raise `StateError` if no tensor can have this layout."""
        ordered = sorted(self.order) == list(range(len(self.shape)))
        if self.dtype not in DTYPES or not ordered or any(size < 0 for size in self.shape):
            msg = f"state header describes an impossible tensor: {self}"
            raise StateError(msg)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` can take these bytes as they are."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == DTYPES[self.dtype]


def layout(tensor: torch.Tensor) -> Layout:
    """Return the layout in which `tensor` is sent: as it lies in memory, if it is dense."""
    order: Sequence[int] = range(tensor.dim())
    if not tensor.is_contiguous():
        strides = tensor.stride()
        order = sorted(order, key=lambda dim: -strides[dim])
    return Layout(_NAMES[tensor.dtype], tuple(tensor.shape), tuple(order), tensor.device.type)


def refuse_unreadable(tensor: torch.Tensor, path: str) -> None:
    """Raise `StateError` naming `path` if the tensor has no bytes of its own to send."""
    if torch.nn.parameter.is_lazy(tensor):
        why = "has no shape yet; run one forward before tracking it"
    elif is_traceable_wrapper_subclass(tensor):
        name = type(tensor).__name__
        why = f"is a `{name}`; of wrapped tensors only a model's own DTensors can be tracked"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        why = "is a sparse or quantized tensor; only dense ones can be tracked"
    elif tensor.device.type == "meta":
        why = "is on the meta device and has no values"
    elif tensor.is_inference():
        why = "was made in inference mode and cannot be written to"
    else:
        return
    msg = f"{path} {why}"
    raise StateError(msg)


def copy_out(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the bytes of each in the order of its `layout`, by one transfer per device."""
    flats = [t if _is_plain(t) else _flat(t, layout(t).order) for t in tensors]
    remote = [i for i, flat in enumerate(flats) if flat.device.type != "cpu"]
    for device in {flats[i].device for i in remote}:
        indices = [i for i in remote if flats[i].device == device]
        together = torch.cat([flats[i] for i in indices]).cpu()
        start = 0
        for index in indices:
            size = flats[index].numel()
            flats[index] = together[start : start + size]
            start += size
    return [bytes(view(flat)) for flat in flats]


def from_bytes(data: bytes, described: Layout) -> torch.Tensor:
    """Return a new CPU tensor made of what `copy_out` gave. Raises `StateError` if sizes differ."""
    described.check()
    if len(data) != described.size_bytes:
        msg = f"{len(data)} bytes cannot be a tensor of {described.size_bytes}"
        raise StateError(msg)
    tensor = allocate(described, torch.device("cpu"))
    view(_flat(tensor, described.order))[:] = data
    return tensor


def shaped(flat: torch.Tensor, described: Layout) -> torch.Tensor:
    """Return the tensor that lies in these bytes, which may be more than it needs."""
    data = flat[: described.size_bytes].view(DTYPES[described.dtype])
    return data.view([described.shape[dim] for dim in described.order]).permute(
        _inverse(described.order)
    )


def allocate(described: Layout, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor that lies in memory as its bytes are sent."""
    dense = torch.empty(
        [described.shape[dim] for dim in described.order],
        dtype=DTYPES[described.dtype],
        device=device,
    )
    return dense.permute(_inverse(described.order))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda position: order[position])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes are where `view` looks for them."""
    contiguous = tensor.device.type == "cpu" and tensor.is_contiguous()
    return contiguous and not tensor.is_conj() and not tensor.is_neg()


def _alias(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor | None:
    """Return the tensor's own memory as flat bytes, or None if it is not in one piece."""
    dense = tensor.detach().permute(*order) if order else tensor.detach()
    if not dense.is_contiguous() or dense.is_conj() or dense.is_neg():
        return None
    return dense.reshape(-1).view(torch.uint8)


def _flat(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the tensor's bytes in one piece: its own memory if it lies so, else a copy."""
    flat = _alias(tensor, order)
    if flat is not None:
        return flat
    dense = tensor.detach().permute(*order).resolve_conj().resolve_neg()
    return dense.contiguous().reshape(-1).view(torch.uint8)


def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite `tensor` with `value`, of the same shape, even if it was made by `expand`."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until devices have done what was asked of them."""
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


class Area:
    """A bounded piece of CPU memory through which bytes pass to and from tensors."""

    def __init__(self, size: int, *, pinned: bool = False) -> None:
        self.tensor = torch.empty(
            size, dtype=torch.uint8, pin_memory=pinned and torch.cuda.is_available()
        )
        self.memory = view(self.tensor)


class Cells:
    """A live tensor's bytes by range, in the order that a sender chose.

    A tensor with gaps or overlaps has no bytes in one piece: it is copied whole, and written back
    when all its bytes have come, in whatever order, each once.
    """

    def __init__(self, tensor: torch.Tensor, order: Sequence[int]) -> None:
        self._tensor = tensor
        self._order = order
        flat = _alias(tensor, order)
        self.apart = flat is None
        """Whether the bytes are a copy."""
        self._lock = threading.Lock()
        self._written = 0
        self._flat = _flat(tensor, order) if flat is None else flat
        self.size = self._flat.numel()
        self._memory = view(self._flat) if self._flat.device.type == "cpu" else None

    def read(self, start: int, stop: int, area: Area, at: int) -> memoryview:
        """Return a range of the bytes: where they are if in memory, else copied to `area[at:]`."""
        if self._memory is not None:
            return self._memory[start:stop]
        end = at + stop - start
        area.tensor[at:end].copy_(self._flat[start:stop])
        return area.memory[at:end]

    def write(self, start: int, area: Area, at: int, size: int) -> bool:
        """Overwrite `size` bytes from `start` with `area[at:]`; return whether all have come."""
        if self._memory is not None:
            self._memory[start : start + size] = area.memory[at : at + size]
        else:
            self._flat[start : start + size].copy_(area.tensor[at : at + size])
        with self._lock:
            self._written += size
            complete = self._written == self.size
        if self.apart and complete:
            self._put_back()
        return complete

    def _put_back(self) -> None:
        dense = self._tensor.detach().permute(*self._order)
        put(dense, self._flat.view(dense.dtype).view(dense.shape))
