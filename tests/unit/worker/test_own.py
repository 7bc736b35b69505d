"""A rank's own part of a step, with a counter of waits that the test turns."""

from __future__ import annotations

import pytest

from tmover.comm.idle import Idle
from tmover.worker import own
from tmover.worker.own import WINDOW, Own


class Clock:
    """A clock, and a counter of waits beside it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.idle = Idle()
        self.idle.follow()

    def monotonic(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.idle.charge(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(own, "time", made)
    return made


def step(clock: Clock, one: Own, *, work_s: float = 1.0, wait_s: float = 0.0) -> None:
    one.begin()
    clock.work(work_s / 2)
    clock.wait(wait_s)
    one.pause()
    clock.wait(7.0)  # for the others' votes
    one.resume()
    clock.work(work_s / 2)
    one.end()
    clock.work(3.0)  # the script's own, between two steps


@pytest.mark.parametrize("wait_s", [0.0, 0.5, 100.0])
def test_whoever_waits_for_a_slow_rank_is_not_slow(clock: Clock, wait_s: float) -> None:
    one = Own(clock.idle)

    for _ in range(5):
        step(clock, one, wait_s=wait_s)

    assert one.median_s() == 1.0


def test_nothing_is_said_of_few_steps_or_where_nobody_sees_who_waits(clock: Clock) -> None:
    one = Own(clock.idle)
    for _ in range(4):
        step(clock, one)
    assert one.median_s() == 0.0

    step(clock, one)
    assert one.median_s() == 1.0
    clock.idle.is_blind = True
    assert one.median_s() == 0.0


def test_only_the_last_steps_count_and_none_of_another_world(clock: Clock) -> None:
    one = Own(clock.idle)
    for work_s in (*[9.0] * 30, *[2.0] * WINDOW):
        step(clock, one, work_s=work_s)
    assert one.median_s() == 2.0

    one.forget()
    assert one.median_s() == 0.0


def test_an_attempt_that_was_lost_does_not_count(clock: Clock) -> None:
    one = Own(clock.idle)
    for _ in range(5):
        one.begin()
        clock.work(50.0)
        one.pause()  # the vote is broken, and the step is done again
        clock.work(8.0)
        step(clock, one)

    assert one.median_s() == 1.0


def test_what_is_voted_on_outside_of_steps_is_no_step(clock: Clock) -> None:
    one = Own(clock.idle)
    for _ in range(6):
        one.pause()
        clock.work(5.0)
        one.resume()
        one.end()

    assert one.median_s() == 0.0
