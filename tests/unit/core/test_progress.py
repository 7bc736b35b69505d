"""Who keeps the others waiting, and who is stuck: fed with what ranks say, without any waiting."""

from __future__ import annotations

import msgspec
import pytest

from tmover.core.progress import (
    Activity,
    Limits,
    Progress,
    Standstill,
    Suspicion,
    blockers,
    lateness,
    straggler,
    suspicion,
)

LIMITS = Limits(stuck_s=60.0, stuck_steps=10.0)
Ranks = dict[int, Progress]


def ranks(*awaits: tuple[int, ...], step: int = 10, median_s: float = 1.0) -> Ranks:
    """Return ranks in the middle of a step; each waits for those given."""
    return {
        rank: Progress(
            rank=rank, step=step, activity="step", awaits=those, median_s=median_s, steps=10
        )
        for rank, those in enumerate(awaits)
    }


def but(said: Ranks, rank: int, **changes: object) -> Ranks:
    return {**said, rank: msgspec.structs.replace(said[rank], **changes)}


HUNG = ranks((2,), (2,), (), (2,))
"""Everybody waits for rank 2."""


def after(seconds: float, said: Ranks, limits: Limits = LIMITS) -> Suspicion | None:
    """Return what is suspected of a job that has said the same for so long."""
    still = Standstill().seen(1, said, 1000.0)
    for tick in range(int(seconds) + 1):
        still = still.seen(1, said, 1000.0 + tick)
    return suspicion(still, said, limits, 1000.0 + seconds)


# --- whom everybody waits for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (HUNG, (2,)),
        (ranks((3,), (0,), (), (2,)), (2,)),  # around a ring
        (ranks((2, 3), (2, 3), (), ()), (2, 3)),
        (ranks((1,), (0,), (), ()), ()),  # two wait for each other
        (ranks((1,), (2,), (0,)), ()),
        (ranks((), ()), ()),
        (ranks(()), ()),
        ({}, ()),
        (ranks((7,), ()), ()),  # for somebody who has said nothing
    ],
)
def test_they_wait_for_nobody_and_all_others_for_them(said: Ranks, found: tuple[int, ...]) -> None:
    assert blockers(said) == found


# --- a standstill ---------------------------------------------------------------------------------


def test_a_standstill_is_suspect_after_a_while_and_certain_in_the_end() -> None:
    assert after(14, HUNG) is None
    early, late = after(15, HUNG), after(60, HUNG)

    assert early == Suspicion(ranks=(2,), still_s=15, limit_s=60)
    assert early is not None
    assert not early.is_certain
    assert str(early) == "no step for 15 s of 60 s, all wait for rank 2"
    assert late is not None
    assert late.is_certain


def test_a_step_that_usually_takes_a_minute_may_take_ten() -> None:
    slow = ranks((2,), (2,), (), median_s=60.0)

    assert after(149, slow) is None
    found = after(599, slow)
    assert found is not None
    assert not found.is_certain
    found = after(600, slow)
    assert found is not None
    assert found.is_certain


def test_nothing_is_said_before_the_length_of_a_step_is_known() -> None:
    assert after(1000, ranks((2,), (2,), (), median_s=0.0)) is None


def test_nobody_is_stuck_in_the_first_steps() -> None:
    assert after(1000, ranks((2,), (2,), (), step=1)) is None
    assert after(1000, ranks((2,), (2,), (), step=2)) is not None


@pytest.mark.parametrize("activity", [Activity.COMPILING, Activity.BETWEEN_STEPS])
def test_a_rank_that_compiles_or_writes_a_checkpoint_takes_its_time(activity: Activity) -> None:
    assert after(1000, but(HUNG, 2, activity=activity.value)) is None


def test_the_time_of_a_checkpoint_does_not_count_afterwards() -> None:
    writing = but(HUNG, 2, activity=Activity.BETWEEN_STEPS.value)
    still = Standstill().seen(1, writing, 0.0).seen(1, writing, 500.0).seen(1, HUNG, 501.0)

    assert suspicion(still, HUNG, LIMITS, 514.0) is None
    assert suspicion(still, HUNG, LIMITS, 516.0) is not None


def test_a_rank_that_waits_excuses_nobody_by_what_it_does() -> None:
    assert after(60, but(HUNG, 0, activity=Activity.BETWEEN_STEPS.value)) is not None


def test_a_step_or_another_world_begins_it_anew() -> None:
    advanced = ranks((2,), (2,), (), (2,), step=11)
    still = Standstill().seen(1, HUNG, 0.0).seen(1, HUNG, 50.0)

    assert still.seen(1, advanced, 51.0).since == 51.0
    assert still.seen(2, HUNG, 51.0).since == 51.0
    assert still.seen(1, but(HUNG, 2, step=11), 51.0).since == 0.0  # one rank alone is no step


def test_a_circle_names_nobody() -> None:
    found = after(100, ranks((1,), (0,)))

    assert found is not None
    assert str(found) == "no step for 100 s of 60 s, nobody can be named"


# --- stragglers -----------------------------------------------------------------------------------


def waited(*by_rank: dict[int, float], steps: int = 10, median_s: float = 1.0) -> Ranks:
    return {
        rank: Progress(rank=rank, step=20, waited=waits, steps=steps, median_s=median_s)
        for rank, waits in enumerate(by_rank)
    }


def test_the_rank_that_others_wait_for_is_late() -> None:
    said = waited({2: 5.0, 1: 0.1}, {2: 4.9}, {})

    assert lateness(said) == {0: 0.0, 1: 0.0, 2: 0.5}
    assert straggler(said) == 2


def test_around_a_ring_only_who_does_not_wait_itself_is_late() -> None:
    said = waited({3: 5.0}, {0: 5.0}, {}, {2: 5.0})

    assert lateness(said) == {0: 0.0, 1: 0.0, 2: 0.5, 3: 0.0}
    assert straggler(said) == 2


def test_a_little_waiting_makes_no_straggler() -> None:
    assert straggler(waited({1: 0.9}, {})) is None
    assert straggler(waited({1: 1.0}, {})) == 1
    assert straggler(waited({1: 1.0}, {}, median_s=0.0)) is None
    assert straggler({}) is None


def test_whom_nobody_knows_is_not_late() -> None:
    assert lateness(waited({7: 5.0}, {})) == {0: 0.0, 1: 0.0}
