"""What has memory of its own, and what only looks so."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from tmover.comm.tensors import flat, plain
from tmover.errors import UnsupportedError


def test_the_result_of_a_functional_collective_is_its_tensor() -> None:
    """A stage whose last layer is split hands one to the next stage: it has no memory."""
    held = torch.arange(6.0).view(2, 3)
    result = AsyncCollectiveTensor(held)

    assert plain(result) is held
    assert flat(result).data_ptr() == held.data_ptr()


def test_another_wrapper_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="a `TwoTensor` cannot be sent"):
        plain(TwoTensor(torch.zeros(2), torch.zeros(2)))  # type: ignore[no-untyped-call]


def test_tensors_and_parameters_are_as_they_are() -> None:
    for tensor in (torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), torch.zeros(3)[1:]):
        assert plain(tensor) is tensor
