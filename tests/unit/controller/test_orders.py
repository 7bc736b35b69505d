"""Standbys that were ordered and will not come."""

from __future__ import annotations

import dataclasses

import pytest

from support.jobs import Story
from tmover.controller.orders import Orders, on_order
from tmover.core.events import StandbysGone
from tmover.core.job import Job
from tmover.core.roster import Ordered
from tmover.scheduler.interface import Allocation, Fate

FORMED = Story(nnodes=2, standbys=0, allocated=True).training().job
SEAT = FORMED.agents[FORMED.slots[0]].node
WAITS = dataclasses.replace(FORMED, ordered=Ordered(1, 7))
OVER = StandbysGone(job="j", epoch=7)


def found(at: float, standbys: int = 0, *nodes: str) -> Allocation:
    words = tuple(f"standby job {n}" for n in range(standbys))
    return Allocation(
        job="j", fate=Fate.RUNNING, text="", standbys=words, standby_nodes=nodes, at=at
    )


def polls(orders: Orders, job: Job, first: int, last: int, standbys: int = 0) -> list[int]:
    """Return the polls at which standbys are to be ordered anew; each is looked at twice."""
    looks = [float(at) for at in range(first, last) for _ in range(2)]
    return [int(at) for at in looks if orders.look(job, found(at, standbys)) == OVER]


@pytest.mark.parametrize(
    ("standbys", "nodes", "count"),
    [(0, (), 0), (1, (), 1), (1, ("n9",), 1), (1, (SEAT,), 0), (3, ("n9", SEAT), 2)],
)
def test_on_order_is_what_waits_or_has_not_joined(
    standbys: int, nodes: tuple[str, ...], count: int
) -> None:
    assert on_order(FORMED, found(1.0, standbys, *nodes)) == count


def test_what_three_polls_do_not_show_is_ordered_anew_and_then_less_and_less_often() -> None:
    assert polls(Orders(lambda _: False), WAITS, 0, 200) == [2, 8, 20, 44, 92, 140, 188]


def test_what_is_on_order_is_waited_for() -> None:
    assert polls(Orders(lambda _: False), WAITS, 0, 20, standbys=1) == []


def test_what_is_seen_in_between_is_not_gone() -> None:
    orders = Orders(lambda _: False)

    assert polls(orders, WAITS, 0, 2) == []
    assert polls(orders, WAITS, 2, 3, standbys=1) == []
    assert polls(orders, WAITS, 3, 5) == []


def test_what_slurm_has_not_taken_yet_is_not_gone() -> None:
    taken: list[str] = []
    orders = Orders(lambda job: job not in taken)

    assert polls(orders, WAITS, 0, 20) == []
    taken.append("j")
    assert polls(orders, WAITS, 20, 24) == [22]


def test_nothing_is_missed_where_nothing_was_ordered() -> None:
    assert polls(Orders(lambda _: False), FORMED, 0, 20) == []


@pytest.mark.parametrize("is_over", [False, True], ids=["joined", "ended"])
def test_once_standbys_have_come_the_next_that_is_gone_is_missed_as_soon(*, is_over: bool) -> None:
    orders = Orders(lambda _: False)
    assert polls(orders, WAITS, 0, 3) == [2]

    if is_over:
        orders.forget(set())
    else:
        polls(orders, FORMED, 3, 4)

    assert polls(orders, WAITS, 4, 8) == [6]
