"""What is known of a job: agents, ranks, and where workers stand."""

import dataclasses
import itertools

import pytest

from support.jobs import Story, reported
from tmover.core.events import Reported
from tmover.core.job import Job


def job_with(*reports: Reported, verified: str = "") -> Job:
    keyed = {(report.worker, report.of): report for report in reports}
    return dataclasses.replace(
        Story().training().job, reports=keyed, verified=frozenset(verified.split())
    )


def test_a_worker_that_has_not_reported_stands_nowhere() -> None:
    assert job_with().standings(["a0/0"]) == []


def test_workers_stand_where_they_reported_last() -> None:
    one, other = reported("a0/0", 5), reported("a1/0", 4)

    assert job_with(one, other).standings(["a1/0", "a2/0", "a0/0"]) == [other, one]


@pytest.mark.parametrize(
    ("early", "late"),
    [
        (reported("a0/0", 5, of=2, epoch=1), reported("a0/0", 6, of=1)),
        (reported("a0/0", 6, of=1), reported("a0/0", 5, of=2)),
        (reported("a0/0", 5, of=2, epoch=1), reported("a0/0", 5, of=1, doubt=6)),
        (reported("s0/0", None, of=2, epoch=0), reported("s0/0", 5, of=3, epoch=0)),
    ],
    ids=["step", "epoch", "own epoch", "state"],
)
def test_the_later_of_two_reports_counts_whichever_comes_first(
    early: Reported, late: Reported
) -> None:
    for order in itertools.permutations((early, late)):
        assert job_with(*order, verified="s0/0").standings([late.worker]) == [late]


def test_what_a_joiner_holds_counts_only_if_it_was_verified() -> None:
    report = reported("s0/0", 5, of=2, epoch=0)

    assert [r.step for r in job_with(report).standings(["s0/0"])] == [None]
    assert [r.step for r in job_with(report, verified="s0/0").standings(["s0/0"])] == [5]


def test_a_rank_is_found_by_its_worker() -> None:
    job = Story(nproc=2).training().job

    assert [job.rank_of(w) for w in ("a0/0", "a1/1", "a2/0")] == [0, 3, 4]
    assert [job.rank_of(w) for w in ("s0/0", "a1/2", "a1/-1", "a1", "x/0", "")] == [None] * 6


def test_a_world_lists_its_ranks_in_order() -> None:
    job = Story(nproc=2).training().job

    plan = job.world(7, ("a2", "a0"))

    assert plan.epoch == 7
    assert [(m.rank, m.worker, m.node, m.endpoint) for m in plan.members] == [
        (0, "a2/0", "n2", "a2:10"),
        (1, "a2/1", "n2", "a2:11"),
        (2, "a0/0", "n0", "a0:10"),
        (3, "a0/1", "n0", "a0:11"),
    ]
    assert plan.rank_of("a0/1") == 3
    assert plan.rank_of("a1/0") is None
    assert plan.member(2).worker == "a0/0"
