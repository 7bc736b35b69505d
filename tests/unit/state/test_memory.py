from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from tmover.errors import StateError
from tmover.state.memory import Area, Cells, Layout, copy_out, from_bytes, layout, view

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random bits, NaNs of all kinds included."""
    high = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(view(tensor.detach().resolve_conj().contiguous()))


def carry(source: torch.Tensor, target: torch.Tensor, chunk: int = 7) -> None:
    """Copy through ranges of `chunk` bytes, as a transfer does."""
    order = layout(source).order
    area = Area(64)
    reading, writing = Cells(source, order), Cells(target, order)
    assert reading.size == writing.size == layout(source).size_bytes
    for start in range(0, reading.size, chunk):
        stop = min(start + chunk, reading.size)
        area.memory[3 : 3 + stop - start] = reading.read(start, stop, area, 3)
        writing.write(start, area, 3, stop - start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype_is_carried(dtype: torch.dtype) -> None:
    source = random_bits((3, 5), dtype)
    target = torch.zeros(3, 5).to(dtype)

    carry(source, target)

    assert bits(target) == bits(source)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "channels last": lambda t: t.unsqueeze(0).to(memory_format=torch.channels_last),
    "with gaps": lambda t: t[:, ::2],
    "expanded": lambda t: t[:1].expand(4, -1, -1),
    "0-dim": lambda t: t[0, 0, 0],
    "empty": lambda t: t[:0],
    "offset": lambda t: t[1:],
}


@pytest.mark.parametrize("source_layout", LAYOUTS)
@pytest.mark.parametrize("target_layout", LAYOUTS)
def test_values_are_carried_between_layouts(source_layout: str, target_layout: str) -> None:
    source = LAYOUTS[source_layout](torch.randn(2, 4, 6))
    target = LAYOUTS[target_layout](torch.zeros(2, 4, 6))
    if source.shape != target.shape:
        target = torch.zeros(source.shape)

    carry(source, target)

    assert torch.equal(source, target)


def test_a_tensor_with_gaps_is_left_alone_until_its_last_byte() -> None:
    whole = torch.zeros(4, 4)
    target = whole[:, ::2]
    cells = Cells(target, (0, 1))
    area = Area(32)
    area.memory[:] = bits(torch.ones(8))

    cells.write(0, area, 0, 16)
    assert not target.any()
    cells.write(16, area, 16, 16)

    assert target.all()
    assert not whole[:, 1::2].any()


def test_a_conjugated_tensor_is_read_as_what_it_means() -> None:
    source = torch.tensor([1 + 2j]).conj()
    target = torch.zeros(1, dtype=torch.complex64)

    carry(source, target)

    assert target.tolist() == [1 - 2j]


def test_a_view_keeps_its_tensor_alive() -> None:
    memory = view(torch.full((1 << 16,), 7, dtype=torch.uint8))
    gc.collect()
    others = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(8)]

    assert bytes(memory) == b"\x07" * (1 << 16)
    del others


def test_a_storage_stays_resizable() -> None:
    tensor = torch.ones(4)
    view(tensor)
    Cells(tensor, (0,))

    tensor.untyped_storage().resize_(0)

    assert tensor.untyped_storage().size() == 0


@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_bytes_become_the_same_tensor(source_layout: str) -> None:
    source = LAYOUTS[source_layout](torch.randn(2, 4, 6))

    (data,) = copy_out([source])

    assert torch.equal(from_bytes(data, layout(source)), source)


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(StateError, match="3 bytes cannot be a tensor of 8"):
        from_bytes(b"123", layout(torch.zeros(2)))


@pytest.mark.parametrize(
    "impossible",
    [
        Layout("float99", (1,), (0,), "cpu"),
        Layout("float32", (-1,), (0,), "cpu"),
        Layout("float32", (1, 2), (0, 0), "cpu"),
        Layout("float32", (1, 2), (0,), "cpu"),
    ],
)
def test_an_impossible_layout_is_refused(impossible: Layout) -> None:
    with pytest.raises(StateError, match="impossible tensor"):
        impossible.check()
