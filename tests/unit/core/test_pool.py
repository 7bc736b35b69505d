"""Which job may have one of another's standbys, and what becomes of the lender."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from support.jobs import Story, expired, joined, reported, requested
from tmover.core import pool
from tmover.core.draft import UNFIT
from tmover.core.events import CancelRequested, Left, Lent
from tmover.core.job import resume
from tmover.core.orders import EndNode, Lend, OrderNode, ReassignNode, ReleaseNode, Stop
from tmover.core.pool import STRANGE, Loan
from tmover.core.roster import Job

TO_K = Lent(job="j", agent="s0", to="k")


def lender(**given: Any) -> Story:
    return Story(**{"standbys": 1, "reserve": 1, "pool": "p", **given}).training()


def borrower(*, reserve: int = 0, name: str = "k", **changes: Any) -> Job:
    """Return a job that stands still for want of a node, on other nodes than the lender."""
    story = Story(standbys=0, reserve=reserve, pool="p").training()
    story.tell(expired("a1"), reported("a0/0", 5), reported("a2/0", 5))
    agents = {
        agent: dataclasses.replace(known, node=f"k{known.node}")
        for agent, known in story.job.agents.items()
    }
    left = {"kn1": 0.0}
    return dataclasses.replace(story.job, name=name, agents=agents, left=left, **changes)


def test_a_job_that_waits_gets_a_warm_standby_of_a_job_of_its_pool() -> None:
    job = lender().job

    assert pool.loan([job, borrower()], borrower(), 0.0) == Loan("j", "s0", "m0")


@pytest.mark.parametrize(
    "change", [{"pool": "q"}, {"pool": ""}, {"owner": "you"}, {"nproc": 2}, {"allocated": True}]
)
def test_nothing_is_lent_out_of_the_pool(change: dict[str, Any]) -> None:
    assert pool.loan([lender().job], borrower(**change), 0.0) is None


def test_a_job_lends_nothing_to_itself_and_nothing_once_it_has_ended() -> None:
    story = lender()
    assert pool.loan([story.job], dataclasses.replace(borrower(), name="j"), 0.0) is None

    story.tell(CancelRequested(job="j", reason="x"))

    assert pool.loan([story.job], borrower(), 0.0) is None


def test_a_standby_that_is_needed_or_rehearses_is_not_lent() -> None:
    moving, failing = lender(), lender()
    moving.tell(requested("n1"))
    failing.tell(expired("a1"))
    building = Story(standbys=1, pool="p").starting()

    for story in (moving, failing, building):
        assert pool.idle(story.job) == []
        assert pool.loan([story.job], borrower(), 0.0) is None
        assert story.tell(TO_K) == []
        assert "s0" not in story.job.gone


def test_no_node_is_lent_that_the_borrower_avoids() -> None:
    assert pool.loan([lender().job], borrower(slow={"m0": 0.0}), 0.0) is None


def test_who_has_more_than_it_keeps_lends_first() -> None:
    rich = dataclasses.replace(lender(standbys=2).job, name="rich")

    found = pool.loan([lender().job, rich], borrower(), 0.0)

    assert found is not None
    assert found.lender == "rich"


def test_a_reserve_is_filled_only_from_what_others_have_too_much_of() -> None:
    needy = dataclasses.replace(Story(standbys=0, reserve=1, pool="p").training().job, name="k")
    apart = {n: dataclasses.replace(a, node=f"k{a.node}") for n, a in needy.agents.items()}
    needy = dataclasses.replace(needy, agents=apart)

    assert pool.loan([lender().job], needy, 0.0) is None
    assert pool.loan([lender(standbys=2).job], needy, 0.0) == Loan("j", "s0", "m0")


@pytest.mark.parametrize("count", [{"unfit": UNFIT}, {"strange": STRANGE}])
def test_a_job_that_no_standby_can_do_anything_for_is_lent_none(count: dict[str, Any]) -> None:
    assert pool.loan([lender().job], borrower(**count), 0.0) is None


def test_lent_ones_that_cannot_run_what_the_job_runs_say_so_and_others_are_ordered() -> None:
    story = Story(standbys=0, pool="p").training()
    story.tell(expired("a1"), reported("a0/0", 5), reported("a2/0", 5))
    why = "job j runs in /gone, which is not on this node"

    for n in range(STRANGE):
        story.tell(msgspec.structs.replace(joined(f"s{n}"), lent_by="k"))
        actions = story.tell(Left(job="j", agent=f"s{n}", code=1, reason=why))
        assert OrderNode in [type(action) for action in actions]

    assert (story.job.strange, story.job.unfit) == (STRANGE, 0)
    assert why in story.job.gone["s0"].reason
    story.tell(msgspec.structs.replace(joined("s7"), lent_by="k"))
    story.warmed("s7")
    assert story.job.strange == 0


def test_the_lender_lets_it_go_orders_another_and_never_has_it_back() -> None:
    story = lender(allocated=True)

    actions = story.tell(TO_K)

    moved = ReassignNode(job="j", agent="s0", node="m0", to="k")
    assert actions[0] == moved
    assert [type(a) for a in actions[1:2]] == [OrderNode]
    assert not [a for a in actions if isinstance(a, Stop | ReleaseNode | EndNode)]
    assert resume(story.job, "s0") == [Lend(job="j", agent="s0", to="k", name="s0~1")]
    assert story.tell(TO_K) == []
    assert story.tell(expired("s0")) == []
    assert story.tell(joined("s0")) == [Lend(job="j", agent="s0", to="k", name="s0~1")]


def test_of_a_script_that_cannot_be_run_twice_the_processes_are_not_lent() -> None:
    story = lender()
    story.job = dataclasses.replace(story.job, stubborn="it cannot")

    story.tell(TO_K)

    assert resume(story.job, "s0") == [Lend(job="j", agent="s0", to="k", name="s0~1", afresh=True)]


def test_one_on_its_way_counts_until_it_has_come_or_its_time_is_over() -> None:
    story = lender(standbys=2)
    story.tell(Lent(job="j", agent="s0", to="k", at=100.0))
    waits = borrower()

    assert pool.underway([story.job], waits, 100.0) == ["s0"]
    assert pool.loan([story.job], waits, 100.0) is None
    assert pool.loan([story.job], waits, 101.0 + pool.LENT_S) == Loan("j", "s1", "m1")


def test_a_node_that_is_to_be_left_needs_one_too() -> None:
    story = Story(standbys=0, pool="p").training()
    assert pool.needs(story.job) == 0

    story.tell(requested("n1"))

    assert pool.needs(story.job) == 1
