"""Jobs in allocations: pending, standbys kept, nodes given back, the end."""

from __future__ import annotations

import msgspec

from support.jobs import (
    Story,
    expired,
    joined,
    launched,
    overdue,
    passed,
    reported,
    requested,
    verified,
)
from tmover.core.draft import LEFT_S, UNFIT
from tmover.core.events import CancelRequested, Joined, LeaseExpired, StandbysGone, Submitted, Wait
from tmover.core.job import resume, wake
from tmover.core.orders import Action, ArmDeadline, EndJob, EndNode, OrderNode, ReleaseNode, Stop
from tmover.core.phase import Ended, Forming, Preparing, Training


def kept(standbys: int = 1, reserve: int = 1) -> Story:
    return Story(standbys=standbys, reserve=reserve, allocated=True)


def orders(actions: list[Action]) -> list[OrderNode]:
    return [action for action in actions if isinstance(action, OrderNode)]


def order(*exclude: str, total: int = 1) -> OrderNode:
    return OrderNode(job="j", exclude=exclude, total=total)


# --- before it starts -----------------------------------------------------------------------------


def test_a_pending_allocation_may_wait_for_days() -> None:
    story = kept().submitted()

    assert story.job.phase == Forming(since=0)
    assert wake(story.job) == []

    deadline = ArmDeadline(job="j", wait=Wait.FORM, epoch=0)
    assert deadline in story.tell(joined("a1"))
    assert deadline not in story.tell(joined("a0"))
    assert wake(story.job) == [deadline]


def test_the_first_agent_tells_the_number_of_ranks_per_node() -> None:
    story = Story(allocated=True)
    story.tell(Submitted(job="j", nnodes=3, nproc=0, owner="me", allocated=True))

    story.tell(joined("a1", nproc=2), joined("a0", nproc=1))

    assert story.job.nproc == 2
    assert story.job.slots == ("", "a1", "")
    assert "a0" in story.job.gone


# --- standbys -------------------------------------------------------------------------------------


def test_standbys_are_ordered_once_every_slot_has_its_node() -> None:
    story = kept(reserve=2).submitted()

    assert orders(story.tell(joined("a0"), joined("a1"))) == []
    assert orders(story.tell(joined("a2"))) == [order("n0", "n1", "n2", total=2)] * 2


def test_a_standby_that_came_is_not_ordered_again() -> None:
    story = kept().submitted()
    story.tell(joined("a0"), joined("a1"), joined("a2"))

    assert orders(story.tell(joined("s0"), launched("s0"))) == []
    assert story.job.ordered.nodes == 0


def test_a_standby_that_is_used_up_is_ordered_anew_at_once() -> None:
    story = kept().training()

    actions = story.tell(requested("n1"))

    assert isinstance(story.job.phase, Preparing)
    assert orders(actions) == [order("m0", "n0", "n1", "n2")]


def test_a_standby_that_is_lost_is_ordered_anew() -> None:
    story = kept().training()

    actions = story.tell(expired("s0"))

    assert orders(actions) == [order("m0", "n0", "n1", "n2")]


def test_a_standby_used_up_by_a_failure_is_ordered_anew() -> None:
    story = kept().training()
    story.tell(expired("a1"))

    actions = story.tell(reported("a0/0", 5), reported("a2/0", 5))

    assert orders(actions) == [order("m0", "n0", "n1", "n2")]


def test_a_node_that_was_lost_is_asked_for_again_after_a_while() -> None:
    story = kept().training()
    story.tell(expired("s0"))
    again = overdue(Wait.STANDBY, story.job.ordered.epoch)

    soon = story.tell(msgspec.structs.replace(again, at=LEFT_S - 1.0))
    later = story.tell(msgspec.structs.replace(again, at=LEFT_S + 1.0))

    assert orders(soon) == [order("m0", "n0", "n1", "n2")]
    assert orders(later) == [order("n0", "n1", "n2")]


def test_an_order_that_is_overdue_is_made_again() -> None:
    story = kept(standbys=0).training()

    actions = story.tell(overdue(Wait.STANDBY, story.job.ordered.epoch))

    assert orders(actions) == [order("n0", "n1", "n2")]


def test_a_standby_on_a_node_of_the_job_is_none_and_another_is_ordered() -> None:
    story = kept(standbys=0).training()
    twin = Joined(job="j", agent="s7", node="n1", address="n1", nproc=1, standby=True)

    actions = story.tell(twin)

    why = "n1 carries a part of the job already: no standby"
    assert actions[0] == Stop(job="j", agent="s7", code=2, reason=why)
    assert orders(actions) == [order("n0", "n1", "n2")]


def test_standbys_with_another_number_of_workers_are_not_ordered_for_ever() -> None:
    story = kept(standbys=0).training()

    for n in range(UNFIT):
        assert story.job.ordered.nodes == 1
        story.tell(Joined(job="j", agent=f"x{n}", node="n7", address="n7", nproc=9, standby=True))

    assert story.job.ordered.nodes == 0


def test_an_order_of_which_nothing_is_left_is_made_again() -> None:
    story = kept(standbys=0).training()
    epoch = story.job.ordered.epoch

    assert orders(story.tell(StandbysGone(job="j", epoch=epoch - 1))) == []
    assert orders(story.tell(StandbysGone(job="j", epoch=epoch))) == [order("n0", "n1", "n2")]


def test_a_job_that_keeps_no_standbys_orders_none() -> None:
    story = Story(allocated=True).training()

    assert orders(story.tell(expired("s0"))) == []


# --- nodes ----------------------------------------------------------------------------------------


def moved() -> Story:
    """A move of slot 1 has been made, but for the last rank's word."""
    story = kept().switching()
    story.tell(verified("s0/0", 2, 5), passed("a0/0", 2, 5), passed("a2/0", 2, 5))
    return story


def with_standby(story: Story) -> Story:
    story.tell(joined("s1"))
    return story


def expired_at(agent: str, at: float) -> LeaseExpired:
    return msgspec.structs.replace(expired(agent), at=at)


def test_the_leaver_s_node_is_given_back_when_every_rank_has_passed() -> None:
    story = moved()

    actions = story.tell(passed("s0/0", 2, 5))

    released = ReleaseNode(job="j", agent="a1", node="n1", reason="released")
    assert isinstance(story.job.phase, Training)
    assert [a for a in actions if isinstance(a, ReleaseNode)] == [released]


def test_nodes_of_a_job_without_allocations_are_nobody_s_to_give_back() -> None:
    story = Story().switching()
    story.tell(verified("s0/0", 2, 5), passed("a0/0", 2, 5), passed("a2/0", 2, 5))

    actions = story.tell(passed("s0/0", 2, 5))

    assert not any(isinstance(a, ReleaseNode) for a in actions)


def test_a_lost_node_is_fenced_and_not_given_back() -> None:
    story = kept().training()

    actions = story.tell(expired("a1"))

    assert [type(a) for a in actions if isinstance(a, EndNode | ReleaseNode)] == [EndNode]


def test_a_node_that_was_left_is_not_asked_for_again_for_a_while() -> None:
    story = moved()
    story.tell(passed("s0/0", 2, 5))
    at = story.job.left["n1"]

    soon = expired_at("s1", at + LEFT_S - 1)
    assert orders(with_standby(story).tell(soon))[-1].exclude == ("m0", "m1", "n0", "n1", "n2")


def test_a_node_that_was_left_long_ago_is_as_good_as_any() -> None:
    story = moved()
    story.tell(passed("s0/0", 2, 5))
    at = story.job.left["n1"]

    late = expired_at("s1", at + LEFT_S)
    assert orders(with_standby(story).tell(late))[-1].exclude == ("m0", "m1", "n0", "n2")


def test_an_agent_of_a_node_that_was_left_is_told_so_when_it_comes_back() -> None:
    story = moved()
    story.tell(passed("s0/0", 2, 5))

    assert [order.code for order in resume(story.job, "a1")] == [0]  # type: ignore[union-attr]


# --- the end --------------------------------------------------------------------------------------


def test_a_job_that_ends_ends_its_allocations() -> None:
    story = kept().training()

    actions = story.tell(CancelRequested(job="j", reason="Slurm job 7 has ended", code=1))

    assert story.job.phase == Ended(code=1, reason="Slurm job 7 has ended")
    assert actions[-1] == EndJob(job="j", code=1, reason="Slurm job 7 has ended")


def test_a_pending_job_can_be_cancelled() -> None:
    story = kept().submitted()

    actions = story.tell(CancelRequested(job="j", reason="enough"))

    assert actions == [EndJob(job="j", code=130, reason="enough")]
