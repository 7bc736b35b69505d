"""Random generators of a script's own are handed over, and go back, as the global streams do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tmover.errors import StateError
from tmover.state.capture import Tracked, mismatch
from tmover.state.records import Record
from tmover.state.snapshot import Snapshot
from unit.state.conftest import HandOver


class Dice(NamedTuple):
    """A kind of generator, and how to draw from it: an odd number of normal ones."""

    make: Callable[[int], Any]
    draw: Callable[[Any], float]


DICE = {
    "torch": Dice(
        lambda seed: torch.Generator().manual_seed(seed),
        lambda it: float(torch.randn(3, generator=it).sum()),
    ),
    "numpy": Dice(lambda seed: np.random.default_rng(seed), lambda it: float(it.normal())),
    "numpy philox": Dice(
        lambda seed: np.random.Generator(np.random.Philox(seed)), lambda it: float(it.normal())
    ),
    "numpy twister": Dice(
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda it: float(it.integers(1 << 16, dtype=np.uint16)),
    ),
    "old numpy": Dice(lambda seed: np.random.RandomState(seed), lambda it: float(it.normal())),
    "bits": Dice(lambda seed: np.random.PCG64(seed), lambda it: float(it.random_raw())),
    "python": Dice(random.Random, lambda it: float(it.gauss())),
}
KINDS = pytest.mark.parametrize("dice", DICE.values(), ids=DICE)


def tracked(generator: Any) -> Tracked:
    result = Tracked()
    result.track("dice", generator)
    return result


@KINDS
def test_it_goes_on_where_the_rank_that_was_lost_has_left_it(
    dice: Dice, hand_over: HandOver
) -> None:
    """A survivor sends the state, whose own generator stands elsewhere."""
    lost, survivor, joiner = (dice.make(seed) for seed in (1, 2, 3))
    dice.draw(lost)
    ours = tracked(joiner)
    record = Record.capture(tracked(lost), position=None).encode()
    after = [dice.draw(lost) for _ in range(3)]

    received = hand_over(tracked(survivor), ours, record=record)
    Record.decode(received.record).restore_private(ours)

    assert [dice.draw(joiner) for _ in range(3)] == after


@KINDS
def test_it_goes_back_when_a_step_is_done_again(dice: Dice) -> None:
    generator = dice.make(1)
    dice.draw(generator)
    registry = tracked(generator)
    snapshot = Snapshot(registry)

    first = [dice.draw(generator) for _ in range(3)]
    snapshot.restore(registry)

    assert [dice.draw(generator) for _ in range(3)] == first


@KINDS
def test_its_digest_changes_when_it_is_drawn_from(dice: Dice) -> None:
    generator = dice.make(1)
    registry = tracked(generator)
    before = registry.digest()
    assert registry.digest() == before

    dice.draw(generator)

    assert registry.digest() != before
    assert registry.holds(generator)


def test_another_kind_of_generator_has_another_schema() -> None:
    schemas = {name: tracked(dice.make(1)).schema() for name, dice in DICE.items()}

    for name, schema in schemas.items():
        others = {other for other, theirs in schemas.items() if mismatch(schema, theirs)}
        alike = {"numpy", "bits"} if name in {"numpy", "bits"} else {name}
        assert others == DICE.keys() - alike


def test_one_that_stands_nowhere_is_refused() -> None:
    with pytest.raises(
        StateError, match=r"`dice` is a `random\.SystemRandom`; track takes modules"
    ):
        tracked(random.SystemRandom())
