"""Where ours differs from gloo on purpose, and what is then right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from integration.comm.parity.case import sample
from integration.comm.parity.reductions import short

Expected = Callable[[int, int], Any]


class Difference(NamedTuple):
    """Why there is a difference, and what a rank gets here."""

    why: str
    expected: Expected


MOVED = (
    torch.int16, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def fold(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if op == "avg":
        return torch.div(fold("sum", tensors), len(tensors), rounding_mode="trunc")
    return functools.reduce(_FOLDS[op], tensors)


def reductions(op: str, dtype: torch.dtype) -> dict[str, Expected]:
    """Return what reductions over elements of a type give."""

    def everywhere(_rank: int, size: int) -> Any:
        return fold(op, [sample(other, 7, dtype) for other in range(size)])

    def part(rank: int, size: int) -> Any:
        whole = fold(op, [sample(other, 3 * size, dtype) for other in range(size)])
        return whole[3 * rank : 3 * rank + 3]

    def own(rank: int, size: int) -> Any:
        return fold(op, [sample(other + rank, 3, dtype) for other in range(size)])

    return {
        "all_reduce": everywhere,
        "reduce": lambda rank, size: everywhere(rank, size) if rank == size - 1 else None,
        "reduce_scatter": part,
        "reduce_scatter_list": own,
    }


def movements(dtype: torch.dtype) -> dict[str, Expected]:
    """Return what moving elements of a type gives."""

    def every(_rank: int, size: int) -> list[torch.Tensor]:
        return [sample(other, 7, dtype) for other in range(size)]

    def exchanged(rank: int, size: int) -> list[torch.Tensor]:
        wholes = [sample(other, 3 * size, dtype) for other in range(size)]
        return [whole[3 * rank : 3 * rank + 3] for whole in wholes]

    return {
        "broadcast": lambda rank, size: sample(1, 7, dtype),
        "all_gather": every,
        "all_gather_into_tensor": lambda rank, size: joined(every(rank, size)),
        "gather": lambda rank, size: every(rank, size) if rank == 1 else None,
        "scatter": lambda rank, size: sample(rank, 7, dtype),
        "all_to_all": lambda rank, size: [sample(other + rank, 3, dtype) for other in range(size)],
        "all_to_all_single": lambda rank, size: joined(exchanged(rank, size)),
    }


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of any type, also those that `torch.cat` does not know."""
    raw = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
    return raw.view(tensors[0].dtype)


def total(size: int, count: int) -> torch.Tensor:
    return fold("sum", [sample(other, count) for other in range(size)])


# --- calls that gloo refuses ----------------------------------------------------------------------

WE_ALSO_TAKE: dict[str, Difference] = {}
for _dtype in WHOLE:
    for _name, _expected in reductions("avg", _dtype).items():
        WE_ALSO_TAKE[f"{_name}-avg-{short(_dtype)}"] = Difference(
            "an average of whole numbers is the whole part of the quotient", _expected
        )
for _op in _FOLDS:
    for _name, _expected in reductions(_op, torch.int16).items():
        WE_ALSO_TAKE[f"{_name}-{_op}-int16"] = Difference("int16 is a type like others", _expected)
for _dtype in MOVED:
    for _name, _expected in movements(_dtype).items():
        WE_ALSO_TAKE[f"{_name}-{short(_dtype)}"] = Difference("any type can be moved", _expected)
for _dtype in (torch.complex64, torch.complex128):
    WE_ALSO_TAKE[f"gather-{short(_dtype)}"] = Difference(
        "any type can be moved", movements(_dtype)["gather"]
    )


def _uneven(rank: int, size: int) -> Any:
    return [sample(other, other + 1) for other in range(size)]


def _reduced_shapes(rank: int, size: int) -> Any:
    own = total(size, 6 * size)[6 * rank : 6 * rank + 6]
    return own, own.view(2, 3)


def _split_columns(rank: int, size: int) -> Any:
    wholes = [sample(other, 6 * size).view(3, 2 * size).t() for other in range(size)]
    return torch.cat([whole[2 * rank : 2 * rank + 2] for whole in wholes])


_LENGTHS = "tensors of a list may have lengths of their own, as with NCCL"
_SHAPES = "only the number of elements matters, as with NCCL"
_STRIDES = "views with gaps are read and written where their elements are"
WE_ALSO_TAKE |= {
    "all_gather_uneven": Difference(_LENGTHS, _uneven),
    "all_to_all_uneven": Difference(
        _LENGTHS,
        lambda rank, size: [sample(other, other + rank + 1) for other in range(size)],
    ),
    "all_to_all_some_empty": Difference(
        _LENGTHS, lambda rank, size: [sample(other, rank % 2) for other in range(size)]
    ),
    "all_gather_into_tensor_stacked": Difference(
        _SHAPES, lambda rank, size: torch.stack([sample(other, 4) for other in range(size)])
    ),
    "all_gather_into_tensor_0_dim": Difference(
        _SHAPES, lambda rank, size: torch.arange(float(size))
    ),
    "reduce_scatter_tensor_shapes": Difference(_SHAPES, _reduced_shapes),
    "all_to_all_single_input_strided": Difference(_STRIDES, _split_columns),
    "messages_of_strided_tensors": Difference(
        _STRIDES,
        lambda rank, size: sample(0, 12).view(4, 3).t() if rank == 1 else torch.zeros(3, 4),
    ),
    "messages_to_oneself": Difference(
        "a rank may send to itself", lambda rank, size: (True, True, sample(rank, 3))
    ),
    "futures_of_messages": Difference(
        "a message has a future too",
        lambda rank, size: [sample(0, 3)] if rank < 2 else None,
    ),
}


# --- calls that gloo takes, with wrong results ----------------------------------------------------


def _reduced_strided(rank: int, size: int) -> Any:
    base = sample(rank, 12)
    base[::2] = fold("sum", [sample(other, 12)[::2] for other in range(size)])
    return base


def _reduced_part(rank: int, size: int) -> Any:
    base = sample(rank, 24).view(4, 6)
    base[1:3, 2:5] = total(size, 24).view(4, 6)[1:3, 2:5]
    return base


def _scattered_strided(rank: int, size: int) -> Any:
    base = torch.zeros(8)
    base[::2] = fold("sum", [sample(other + rank, 8)[1::2] for other in range(size)])
    return base


def _split_strided(rank: int, size: int) -> Any:
    wholes = [sample(other, 6 * size).view(2 * size, 3) for other in range(size)]
    return torch.cat([whole[2 * rank : 2 * rank + 2] for whole in wholes]).t()


GLOO_IS_WRONG: dict[str, Difference] = {
    "all_reduce_strided": Difference(_STRIDES, _reduced_strided),
    "all_reduce_part_of_a_tensor": Difference(_STRIDES, _reduced_part),
    "reduce_scatter_strided": Difference(_STRIDES, _scattered_strided),
    "all_to_all_single_strided": Difference(_STRIDES, _split_strided),
}
