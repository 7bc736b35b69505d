"""What is tried while a job stands still for want of a node, and what happens at the deadline."""

import msgspec
import pytest

from support.jobs import Story, exited, expired, joined, launched, overdue, reported, warm
from tmover.core import waiting
from tmover.core.events import REQUEUE, Sharing, Stored, Wait
from tmover.core.job import decide, resume, wake
from tmover.core.orders import ArmDeadline, EndJob, OrderNode, Stop, Store
from tmover.core.phase import Ended, Recovering, Storing, Waiting

WHY = "no node came in time for slot 1"


def stood_still(*, allocated: bool = False) -> Story:
    """Return a job of three that has lost `a1` after step 5 and has no standby."""
    story = Story(standbys=0, allocated=allocated).training()
    story.tell(expired("a1"), reported("a0/0", 5), reported("a2/0", 5))
    assert isinstance(story.job.phase, Waiting)
    return story


def given_up() -> Story:
    story = stood_still()
    story.tell(overdue(Wait.NODE, 1))
    return story


def stored(worker: str, epoch: int = 2, reason: str = "") -> Stored:
    return Stored(job="j", worker=worker, epoch=epoch, step=5, reason=reason)


def test_survivors_store_what_they_hold_when_the_wait_is_over() -> None:
    story = stood_still()

    actions = story.tell(overdue(Wait.NODE, 1))

    parts = {"a0/0": (0,), "a2/0": (2, 1)}
    orders = [action for action in actions if isinstance(action, Store)]
    assert [(o.agent, o.parts, o.step, o.plan.members) for o in orders] == [
        (agent, parts, 5, ()) for agent in ("a0", "a2")
    ]
    assert ArmDeadline(job="j", wait=Wait.STORE, epoch=2) in actions


def test_the_job_ends_to_be_requeued_when_the_first_ranks_part_makes_it_whole() -> None:
    story = given_up()

    assert story.tell(stored("a2/0"), stored("a1/0"), stored("a0/0", epoch=1)) == []
    actions = story.tell(stored("a0/0"))

    assert isinstance(story.job.phase, Ended)
    assert story.job.phase.code == REQUEUE
    assert story.job.phase.reason.startswith(f"{WHY}; a checkpoint of step 5 is written")
    assert {a.agent for a in actions if isinstance(a, Stop)} == {"a0", "a2"}


def test_a_part_that_cannot_be_written_ends_the_job_with_its_reason() -> None:
    story = given_up()

    story.tell(stored("a2/0", reason="the disk is full"))

    why = f"{WHY}; no checkpoint was written then: the disk is full"
    assert story.job.phase == Ended(code=REQUEUE, reason=why)


def test_a_survivor_lost_meanwhile_ends_the_job_without_a_checkpoint() -> None:
    story = given_up()

    story.tell(exited("a2"))

    why = f"{WHY}; no checkpoint was written then: a2/0 was lost"
    assert story.job.phase == Ended(code=REQUEUE, reason=why)


def test_a_checkpoint_that_takes_too_long_ends_the_job_without_it() -> None:
    story = given_up()

    story.tell(overdue(Wait.STORE, 1))
    assert isinstance(story.job.phase, Storing)
    story.tell(overdue(Wait.STORE, 2))

    assert isinstance(story.job.phase, Ended)
    assert story.job.phase.reason.endswith("it took too long")


def test_an_allocation_is_ended_with_the_code_that_has_it_requeued() -> None:
    story = stood_still(allocated=True)
    story.tell(overdue(Wait.NODE, 1))

    actions = story.tell(stored("a0/0"))

    assert [a.code for a in actions if isinstance(a, EndJob)] == [REQUEUE]


def test_the_clock_of_another_wait_ends_nothing() -> None:
    job = stood_still().job

    for late in (overdue(Wait.NODE, 0), overdue(Wait.NODE, 2), overdue(Wait.STORE, 1)):
        assert decide(job, late) == (job, [])


def test_a_standby_that_is_warm_just_before_the_deadline_takes_the_slot() -> None:
    story = stood_still()

    story.tell(joined("s0"), launched("s0"), warm("s0/0"))
    assert isinstance(story.job.phase, Recovering)
    story.tell(overdue(Wait.NODE, 1))

    assert isinstance(story.now(), Recovering)


def test_a_standby_that_comes_after_the_deadline_takes_nothing() -> None:
    story = given_up()

    story.tell(joined("s0"), launched("s0"), warm("s0/0"))

    assert isinstance(story.job.phase, Storing)


def test_what_is_to_be_stored_is_said_again_after_a_restart() -> None:
    story = given_up()

    assert [type(order) for order in resume(story.job, "a2")][-1] is Store
    assert wake(story.job)[0] == ArmDeadline(job="j", wait=Wait.STORE, epoch=2)


def test_a_controller_that_starts_again_grants_no_more_time() -> None:
    story = Story(standbys=0).training()
    story.tell(expired("a1"), reported("a0/0", 5))
    story.tell(msgspec.structs.replace(reported("a2/0", 5), at=77.0))

    assert ArmDeadline(job="j", wait=Wait.NODE, epoch=1, since=77.0) in wake(story.job)


def test_who_keeps_copies_writes_the_part_of_the_lost() -> None:
    story = Story(standbys=0).training()
    story.tell(Sharing(job="j", worker="a0/0", launch=1, keepers=(), copies=1))
    story.tell(expired("a1"))
    for worker, kept in (("a0/0", {2: (4, 5)}), ("a2/0", {1: (4, 5)})):
        story.tell(msgspec.structs.replace(reported(worker, 5), own=(4, 5), kept=kept))

    actions = story.tell(overdue(Wait.NODE, 1))

    found = next(action for action in actions if isinstance(action, Store))
    assert (found.step, found.back) == (5, True)
    assert found.parts == {"a0/0": (0,), "a2/0": (2, 1)}


# --- which path -----------------------------------------------------------------------------------


def test_of_two_lost_the_one_whose_agent_lives_begins_again_and_one_node_is_ordered() -> None:
    story = Story(standbys=0, nnodes=4).training()
    story.tell(exited("a1"), expired("a3"), reported("a0/0", 5))

    actions = story.tell(reported("a2/0", 5))

    assert len([a for a in actions if isinstance(a, OrderNode)]) == 1
    assert story.job.agents["a1"].launch == 2


def test_workers_that_ended_too_often_on_a_node_are_not_waited_for_there() -> None:
    story = Story(standbys=0).training()
    story.job = story.with_agent(story.job.agents["a1"], failures=2)

    actions = story.tell(exited("a1"), reported("a0/0", 5), reported("a2/0", 5))

    assert "a1" not in story.job.agents
    assert len([a for a in actions if isinstance(a, OrderNode)]) == 1


def test_two_ordered_for_two_slots_rehearse_one_each() -> None:
    story = Story(standbys=0, nnodes=4).training()
    story.tell(expired("a1"), expired("a3"), reported("a0/0", 5), reported("a2/0", 5))

    story.tell(joined("s0"), joined("s1"), joined("s2"))

    assert [story.job.agents[name].slot for name in ("s0", "s1", "s2")] == [1, 3, 1]


def test_two_lost_with_two_warm_standbys_are_replaced_in_one_world() -> None:
    story = Story(standbys=2, nnodes=4).training()

    story.tell(expired("a1"), expired("a3"), reported("a0/0", 5), reported("a2/0", 5))

    assert isinstance(story.job.phase, Recovering)
    assert set(story.job.slots) == {"a0", "s0", "a2", "s1"}
    assert story.job.in_force == 2


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"model": "x", "optimizer": "o"}, "m0 does not fit: tracked model differ"),
        (None, "m0 is launching for slot 1"),
    ],
)
def test_who_was_tried_and_why_not_is_said(schema: dict[str, str] | None, said: str) -> None:
    story = Story(standbys=0, nnodes=3).training()
    story.tell(expired("a1"), reported("a0/0", 5), reported("a2/0", 5), joined("s0"))
    if schema is not None:
        agent, schemas = story.job.agents["s0"], {"s0/0": schema}
        story.job = story.with_agent(agent, endpoints=("s0:1",), schemas=schemas)

    assert waiting.tried(story.job) == (said,)


def test_a_node_that_is_ordered_is_said() -> None:
    assert waiting.tried(stood_still().job) == ("1 ordered of the scheduler",)
