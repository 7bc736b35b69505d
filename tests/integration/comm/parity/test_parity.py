"""Every call of `torch.distributed` on CPU tensors does what it does on gloo.

All cases run in one set of processes for each size of world and backend; what differs on purpose is
in `differences`, and what is right there is worked out without any communication.
"""

from __future__ import annotations

from typing import Any

import pytest

from integration.comm.parity import (
    exchanges,
    functional,
    gatherings,
    groups,
    messages,
    objects,
    reductions,
    refusals,
)
from integration.comm.parity.case import CASES, SIZES, Failure, plain
from integration.comm.parity.differences import GLOO_IS_WRONG, WE_ALSO_TAKE
from integration.comm.parity.worlds import on_gloo, on_ours

FILES = (exchanges, functional, gatherings, groups, messages, objects, reductions, refusals)
"""Importing them has filled `CASES`."""


def families() -> list[tuple[int, str]]:
    found = {
        (size, case.family): None for size in SIZES for case in CASES.values() if size in case.sizes
    }
    return list(found)


@pytest.mark.parametrize(("size", "family"), families())
def test_a_call_does_what_it_does_on_gloo(size: int, family: str) -> None:
    gloo, ours = on_gloo(size), on_ours(size)
    wrong = {}
    for name, case in CASES.items():
        if case.family == family and size in case.sizes:
            for rank in range(size):
                problem = compare(name, rank, size, gloo[rank][name], ours[rank][name])
                if problem:
                    wrong[name, f"rank {rank} of {size}"] = problem
    assert not wrong


def compare(name: str, rank: int, size: int, gloo: Any, ours: Any) -> Any:
    """Return what is wrong with a result, if anything is."""
    difference = WE_ALSO_TAKE.get(name) or GLOO_IS_WRONG.get(name)
    if difference is not None:
        expected = plain(difference.expected(rank, size))
        return None if ours == expected else {"expected": expected, "ours": ours}
    if isinstance(gloo, Failure) and isinstance(ours, Failure):
        same = gloo.kinds[0] in ours.kinds and (ours.ours or ours.text == gloo.text)
        alike = same or (ours.ours and gloo.kinds[0] == "AssertionError")  # which is no answer
    else:
        alike = gloo == ours
    return None if alike else {"gloo": gloo, "ours": ours}


def test_the_differences_are_still_there() -> None:
    """Else a call on a later torch could be compared, and would not be."""
    gloo = {size: on_gloo(size) for size in SIZES[:2]}

    def outcomes(name: str) -> list[tuple[Any, Any]]:
        difference = WE_ALSO_TAKE.get(name) or GLOO_IS_WRONG[name]
        return [
            (results[rank][name], plain(difference.expected(rank, size)))
            for size, results in gloo.items()
            for rank in range(size)
        ]

    for name in WE_ALSO_TAKE:
        assert any(isinstance(found, Failure) for found, _ in outcomes(name)), name
    for name in GLOO_IS_WRONG:
        assert any(found != right for found, right in outcomes(name)), name
