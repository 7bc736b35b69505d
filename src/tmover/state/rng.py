"""The random number streams of a process: Python's, NumPy's global one, torch's on CPU and CUDA.

A state is bytes (msgpack), never a pickle. NumPy counts only once somebody has imported it, CUDA
only once it is initialised: neither is started for the sake of a capture.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from tmover.errors import StateError
from tmover.state import memory

_PYTHON = struct.Struct("<625I")
_MASK64 = (1 << 64) - 1


class _Numpy(msgspec.Struct, frozen=True, array_like=True):
    """NumPy's legacy global generator (a Mersenne twister unless somebody replaced it)."""

    key: bytes
    position: int
    has_gauss: int
    gauss: float


class _State(msgspec.Struct, frozen=True, array_like=True):
    python: bytes
    gauss: float | None
    torch: bytes
    numpy: _Numpy | None
    cuda: tuple[bytes, ...]


_decoder = msgspec.msgpack.Decoder(_State)


def derive(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends on all parts, and on nothing else."""
    text = "\0".join(f"{type(part).__name__}{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed(value: int) -> None:
    """Seed every stream. Unlike `torch.manual_seed`, leaves a CUDA that is not in use alone."""
    random.seed(value)
    torch.default_generator.manual_seed(value)
    if _cuda_devices():
        torch.cuda.manual_seed_all(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([value & 0xFFFFFFFF, (value & _MASK64) >> 32])


def capture() -> bytes:
    """Return where every stream stands."""
    _, words, gauss = random.getstate()
    state = _State(
        python=_PYTHON.pack(*words),
        gauss=gauss,
        torch=bytes(memory.view(torch.default_generator.get_state())),
        numpy=_capture_numpy(),
        cuda=_capture_cuda(),
    )
    return msgspec.msgpack.encode(state)


def split(data: bytes) -> dict[str, bytes]:
    """Return what `capture` found, stream by stream."""
    state = _decoder.decode(data)
    found = {"python": msgspec.msgpack.encode([state.python, state.gauss]), "torch": state.torch}
    if state.numpy is not None:
        found["numpy"] = msgspec.msgpack.encode(state.numpy)
    return {**found, **{f"cuda:{device}": each for device, each in enumerate(state.cuda)}}


def restore(data: bytes) -> None:
    """Put every stream where `capture` found it. Raises `StateError` if `data` is no capture."""
    try:
        _restore(_decoder.decode(data))
    except (msgspec.MsgspecError, struct.error, ValueError, RuntimeError, TypeError) as error:
        msg = f"random number state cannot be read: {error}"
        raise StateError(msg) from error


def _restore(state: _State) -> None:
    random.setstate((3, _PYTHON.unpack(state.python), state.gauss))
    torch.default_generator.set_state(_byte_tensor(state.torch))
    for device, generator in enumerate(state.cuda[: _cuda_devices()]):
        torch.cuda.set_rng_state(_byte_tensor(generator), device)
    if state.numpy is not None:
        _restore_numpy(state.numpy)


@contextlib.contextmanager
def isolated(value: int) -> Iterator[None]:
    """Run the block on streams seeded with `value`, and put the process's own back afterwards."""
    outside = capture()
    seed(value)
    try:
        yield
    finally:
        restore(outside)


class Stream:
    """Streams of their own for something that is entered again and again, like a sampler."""

    def __init__(self, value: int) -> None:
        self._value = value
        self._inside: bytes | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run the block on these streams, which go on where they stood the last time."""
        outside = capture()
        if self._inside is None:
            seed(self._value)
        else:
            restore(self._inside)
        try:
            yield
        finally:
            self._inside = capture()
            restore(outside)


def _byte_tensor(data: bytes) -> torch.Tensor:
    tensor = torch.empty(len(data), dtype=torch.uint8)
    memory.view(tensor)[:] = data
    return tensor


def _cuda_devices() -> int:
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device_count() if in_use else 0


def _capture_cuda() -> tuple[bytes, ...]:
    states = (torch.cuda.get_rng_state(device) for device in range(_cuda_devices()))
    return tuple(bytes(memory.view(state)) for state in states)


def _capture_numpy() -> _Numpy | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        msg = (
            f"numpy's global generator is a {state['bit_generator']}, put there with "
            "set_bit_generator; only the original MT19937 can be captured"
        )
        raise StateError(msg)
    return _Numpy(
        key=state["state"]["key"].tobytes(),
        position=int(state["state"]["pos"]),
        has_gauss=int(state["has_gauss"]),
        gauss=float(state["gauss"]),
    )


def _restore_numpy(state: _Numpy) -> None:
    import numpy as np

    key = np.frombuffer(state.key, dtype=np.uint32)
    np.random.set_state(("MT19937", key, state.position, state.has_gauss, state.gauss))
