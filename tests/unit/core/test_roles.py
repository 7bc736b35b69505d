"""Which slots are one role, and the way of a standby through all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from support.jobs import Story, exited, expired, launched, reported, requested, warm
from tmover.core import roles, standby
from tmover.core.events import NodeLost
from tmover.core.job import Job
from tmover.core.orders import Assign, Welcome
from tmover.core.phase import Preparing, Recovering, Waiting
from tmover.core.view import view

STAGE = {"first": {"model": "a"}, "middle": {"model": "b"}, "last": {"model": "c"}}
BY_SLOT = ("first", "first", "middle", "middle", "last", "last")


def pipeline(*, standbys: int = 1) -> Story:
    """Three stages, two slots each; its standby has just come up warm as the last slot."""
    story = Story(nnodes=6, standbys=standbys).training()
    schemas = {slot: STAGE[stage] for slot, stage in enumerate(BY_SLOT)}
    new: dict[str, Any] = {"cast": 0, "slot": 5, "prove": False, "rehearsed": frozenset()}
    fresh = {
        name: dataclasses.replace(agent, **new, schemas={}, proofs={}) if name[0] == "s" else agent
        for name, agent in story.job.agents.items()
    }
    found = roles.found(schemas, 1)
    story.job = dataclasses.replace(story.job, schemas=schemas, roles=found, agents=fresh)
    return story


def rehearse(story: Story, agent: str = "s0", proof: str = "") -> list[int]:
    """Let a standby rehearse whatever it is told to; return the slots, in order."""
    went: list[int] = []
    while not (known := story.job.agents[agent]).is_ready and known.sandbox:
        went.append(known.slot)
        said = proof if known.prove else None
        schema = STAGE[BY_SLOT[known.slot]]
        story.tell(warm(f"{agent}/0", known.launch, schema, cast=known.cast, proof=said))
    return went


def takes(job: Job, agent: str = "s0") -> list[int]:
    return [slot for slot in range(6) if standby.takes(job, job.agents[agent], slot)]


def test_slots_whose_ranks_build_the_same_are_one_role() -> None:
    same, other = {"model": "a"}, {"model": "b"}

    assert roles.found({0: same, 1: other, 2: same, 3: other}, nproc=2) == ((0, 1),)
    assert roles.found({0: same, 1: other, 2: other, 3: same}, nproc=2) == ((0,), (1,))
    assert roles.found({}, nproc=2) == ()


def test_a_standby_rehearses_the_first_the_last_and_the_middle_role_and_proves_itself() -> None:
    story = pipeline()

    assert rehearse(story) == [5, 0, 2, 3]
    assert takes(story.job) == [2, 3]
    [shown] = view(story.job).standbys
    assert (shown.slot, shown.takes, shown.rehearsed) == (3, (2, 3), (0, 1, 2, 3, 4, 5))
    assert shown.rebuilds == ""


def test_a_standby_that_keeps_its_rank_takes_its_own_slot_alone() -> None:
    story = pipeline()

    rehearse(story, proof="`rank` is not what it would be")

    assert takes(story.job) == [3]
    assert view(story.job).standbys[0].rebuilds == "`rank` is not what it would be"


def test_a_slot_of_the_rested_role_is_taken_at_once() -> None:
    story = pipeline()
    rehearse(story)
    story.tell(exited("a2"))

    actions = story.tell(*[reported(f"a{slot}/0", 5) for slot in (0, 1, 3, 4, 5)])

    assert any(isinstance(action, Assign) for action in actions)
    assert story.job.slots[2] == "s0"


def test_a_slot_of_another_role_is_rehearsed_first_in_the_same_processes() -> None:
    story = pipeline()
    rehearse(story)
    story.tell(expired("a0"))

    actions = story.tell(*[reported(f"a{slot}/0", 5) for slot in (1, 2, 3, 4, 5)])

    assert isinstance(story.job.phase, Waiting)
    [order] = [action for action in actions if isinstance(action, Welcome)]
    assert (order.agent, order.slot, order.launch, order.prove) == ("s0", 0, 1, False)
    assert rehearse(story) == [0]
    assert isinstance(story.job.phase, Recovering)
    assert story.job.slots[0] == "s0"


def test_who_keeps_its_rank_rehearses_even_a_slot_of_the_same_role() -> None:
    story = pipeline()
    rehearse(story, proof="captured")
    story.tell(expired("a2"))

    story.tell(*[reported(f"a{slot}/0", 5) for slot in (0, 1, 3, 4, 5)])

    assert isinstance(story.job.phase, Waiting)
    assert rehearse(story) == [2]
    assert story.job.slots[2] == "s0"


def test_a_planned_move_sends_the_standby_to_the_leavers_slot_if_it_must() -> None:
    story = pipeline()
    rehearse(story)

    story.tell(requested("n5"))

    assert rehearse(story) == [5]
    assert isinstance(story.job.phase, Preparing)
    assert story.job.phase.move.slots[5] == "s0"


def test_words_of_an_earlier_rehearsal_are_not_of_this_one() -> None:
    story = pipeline()
    story.tell(warm("s0/0", schema=STAGE["last"]))
    assert story.job.agents["s0"].slot == 0

    story.tell(warm("s0/0", schema=STAGE["last"]))

    assert not story.job.agents["s0"].is_ready


def fails_again(story: Story, launch: int, reason: str) -> Welcome:
    """Let a standby rehearse its first slot, and its script fail in the second."""
    workers = launched("s0", launch)
    story.tell(workers, warm("s0/0", launch, STAGE["last"]))
    [order] = story.tell(exited("s0", launch=launch, code=1, reason=reason))
    assert isinstance(order, Welcome)
    return order


def test_a_script_that_fails_twice_when_run_again_is_run_in_fresh_processes_from_then_on() -> None:
    story = pipeline()

    assert fails_again(story, 1, "already initialised").launch == 2
    order = fails_again(story, 2, "already initialised")

    assert (order.launch, order.cast, order.slot) == (3, 0, 5)
    assert story.job.agents["s0"].failures == 0
    assert story.job.stubborn == "already initialised"
    story.tell(launched("s0", 3), warm("s0/0", 3, STAGE["last"]))
    assert story.job.agents["s0"].is_ready
    assert story.job.agents["s0"].cast == 0


def test_a_script_that_failed_once_when_run_again_is_run_again_all_the_same() -> None:
    story = pipeline()
    order = fails_again(story, 1, "the disk is full")
    assert (order.launch, order.cast, order.slot) == (2, 0, 5)
    assert story.job.agents["s0"].failures == 0
    assert not story.job.stubborn

    story.tell(launched("s0", 2))

    assert rehearse(story) == [5, 0, 2, 3]
    assert takes(story.job) == [2, 3]


def test_a_kill_in_a_rehearsal_says_nothing_about_the_script() -> None:
    story = pipeline()
    story.tell(warm("s0/0", schema=STAGE["last"]))

    story.tell(exited("s0"))

    assert not story.job.stubborn
    assert story.job.agents["s0"].failures == 1


def test_of_more_standbys_than_slots_each_goes_its_way_and_none_is_in_the_way_of_the_job() -> None:
    story = pipeline(standbys=7)
    before = story.job

    for number in range(7):
        story.tell(warm(f"s{number}/0", schema=STAGE["last"]))
    story.tell(exited("s2"))
    story.tell(NodeLost(job="j", node=story.job.agents["s4"].node, reason="down"))
    ways = {name: rehearse(story, name) for name in ("s0", "s1", "s3", "s5", "s6")}

    assert {tuple(way) for way in ways.values()} == {(0, 2, 3)}
    assert (story.job.phase, story.job.epoch) == (before.phase, before.epoch)
    assert story.job.slots == before.slots
    assert all(takes(story.job, name) == [2, 3] for name in ways)


def test_a_stubborn_script_rests_where_it_is_and_is_started_afresh_for_another_slot() -> None:
    story = pipeline()
    story.job = dataclasses.replace(story.job, stubborn="x")
    story.tell(warm("s0/0", schema=STAGE["last"]))
    assert story.job.agents["s0"].is_ready
    story.tell(expired("a0"))

    actions = story.tell(*[reported(f"a{slot}/0", 5) for slot in (1, 2, 3, 4, 5)])

    [order] = [action for action in actions if isinstance(action, Welcome)]
    assert (order.launch, order.cast, order.slot) == (2, 0, 0)


def test_a_job_of_one_slot_has_nothing_to_prove() -> None:
    story = Story(nnodes=1).training()

    assert story.job.agents["s0"].cast == 0
    assert story.job.agents["s0"].is_ready
