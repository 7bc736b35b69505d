"""How the loop of a script is left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tmover.worker.session import is_at_break


def numbers(seen: list[bool]) -> Iterator[int]:
    try:
        yield from range(3)
    except GeneratorExit:
        seen.append(is_at_break(sys._getframe().f_back))
        raise


def leaves_by_break(seen: list[bool]) -> None:
    for _ in numbers(seen):
        break


def leaves_by_return(seen: list[bool]) -> int:
    for number in numbers(seen):
        return number
    return 0


def leaves_by_break_in_a_block(seen: list[bool]) -> None:
    for number in numbers(seen):
        with pytest.raises(ValueError, match="invalid"):
            int("x")
        if number == 1:
            break


def raises(seen: list[bool]) -> None:
    for number in numbers(seen):
        if number == 1:
            raise KeyError(number)


def raises_in_a_call(seen: list[bool]) -> None:
    for number in numbers(seen):
        seen[number]


def exits(seen: list[bool]) -> None:
    for number in numbers(seen):
        sys.exit(number)


@pytest.mark.parametrize("loop", [leaves_by_break, leaves_by_return, leaves_by_break_in_a_block])
def test_a_loop_that_is_left_by_a_decision_is_told(loop: Callable[[list[bool]], object]) -> None:
    seen: list[bool] = []

    loop(seen)

    assert seen == [True]


@pytest.mark.parametrize("loop", [raises, raises_in_a_call, exits])
def test_a_loop_that_is_left_by_an_exception_is_not(loop: Callable[[list[bool]], object]) -> None:
    seen: list[bool] = []

    with pytest.raises((KeyError, IndexError, SystemExit)):
        loop(seen)

    assert seen == [False]


def test_a_loop_that_ends_is_not_told() -> None:
    seen: list[bool] = []

    assert list(numbers(seen)) == [0, 1, 2]
    assert not seen
