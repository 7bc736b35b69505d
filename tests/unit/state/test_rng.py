from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tmover.errors import StateError
from tmover.state import rng


def draw() -> list[Any]:
    """A draw of every kind, those included that keep half of a pair for the next time."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.rand(),
        np.random.randn(),
        np.random.randint(1 << 30),
        torch.rand(()).item(),
        torch.randn(3).tolist(),
        torch.randperm(5).tolist(),
    ]


@pytest.mark.parametrize("drawn_before", [0, 1, 2])
def test_streams_go_on_where_they_were_captured(drawn_before: int) -> None:
    for _ in range(drawn_before):
        draw()
    state = rng.capture()
    expected = [draw() for _ in range(3)]

    rng.restore(state)

    assert [draw() for _ in range(3)] == expected


def test_a_state_captured_after_a_restore_is_the_same_bytes() -> None:
    draw()
    state = rng.capture()
    draw()

    rng.restore(state)

    assert rng.capture() == state


def test_capturing_draws_nothing() -> None:
    rng.seed(5)
    expected = draw()
    rng.seed(5)

    rng.capture()

    assert draw() == expected


def test_an_isolated_block_leaves_no_trace() -> None:
    before = rng.capture()

    with rng.isolated(3):
        first = draw()
    with rng.isolated(3):
        second = draw()
    with rng.isolated(4):
        other = draw()

    assert first == second != other
    assert rng.capture() == before


def test_an_isolated_block_that_raises_leaves_no_trace() -> None:
    before = rng.capture()

    with contextlib.suppress(ZeroDivisionError), rng.isolated(3):
        draw()
        raise ZeroDivisionError

    assert rng.capture() == before


def test_a_stream_goes_on_from_entry_to_entry() -> None:
    with rng.isolated(9):
        expected = draw() + draw()
    stream = rng.Stream(9)

    with stream.active():
        got = draw()
    draw()
    with stream.active():
        got += draw()

    assert got == expected


def test_seeds_differ_by_every_part() -> None:
    seeds = {
        rng.derive("batch", 0, 1, 2, 3),
        rng.derive("order", 0, 1, 2, 3),
        rng.derive("batch", 0, 1, 3, 2),
        rng.derive("batch", 0, 12, 3),
        rng.derive("batch", 0, 1, 23),
        rng.derive("batch", "0", 1, 2, 3),
    }

    assert len(seeds) == 6
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_seed_is_the_same_in_every_process_and_version() -> None:
    assert rng.derive("batch", 7, 1) == 3848412412841555823


@given(st.binary())
def test_what_is_no_capture_is_refused(data: bytes) -> None:
    before = rng.capture()

    with pytest.raises(StateError):
        rng.restore(data)

    assert rng.capture() == before


def test_a_generator_that_is_not_ours_to_capture_is_refused() -> None:
    random_module: Any = np.random
    original = random_module.get_bit_generator()
    random_module.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(StateError, match="PCG64"):
            rng.capture()
    finally:
        random_module.set_bit_generator(original)
