"""What is shown of a job."""

import dataclasses

import msgspec

from support.jobs import SCHEMA, Story, exited, expired, joined, reported, requested, verified
from tmover.core.events import CancelRequested, Looping, Placing, Sharing, Warm
from tmover.core.view import MoveView, SlotView, StandbyView, WaitView, view


def test_a_job_in_training() -> None:
    shown = view(Story().training().job)

    assert (shown.job, shown.owner, shown.phase) == ("j", "me", "training")
    assert (shown.epoch, shown.world_size, shown.move) == (1, 3, None)
    assert (shown.outcome, shown.code) == ("", None)
    assert shown.slots[1] == SlotView(slot=1, node="n1", agent="a1", state="looping")
    assert shown.standbys == (
        StandbyView(
            node="m0",
            agent="s0",
            state="warm",
            slot=0,
            takes=(0, 1, 2),
            rehearsed=(0, 1, 2),
            rebuilds="",
        ),
    )


def test_what_the_workers_of_a_standby_rehearsed_with_is_said_once_if_it_is_the_same() -> None:
    story = Story(nproc=2).training()
    said = [("s0/0", "recorded values"), ("s0/1", "made-up values")]

    for worker, recorded in (*said, ("s0/0", "made-up values")):
        cast = story.job.agents["s0"].cast
        story.tell(
            Warm(job="j", worker=worker, launch=1, schema=SCHEMA, cast=cast, recorded=recorded)
        )
        if worker == "s0/1":
            both = view(story.job).standbys[0].recorded

    assert both == "recorded values | made-up values"
    assert view(story.job).standbys[0].recorded == "made-up values"


def test_what_a_standby_rehearsed_with_before_it_was_started_afresh_is_forgotten() -> None:
    story = Story().training()
    story.tell(Warm(job="j", worker="s0/0", launch=1, schema=SCHEMA, recorded="recorded values"))

    story.tell(exited("s0"))

    assert view(story.job).standbys[0].recorded == ""


def test_a_job_that_forms() -> None:
    story = Story().submitted()
    story.tell(joined("a0"))

    shown = view(story.job)

    assert shown.phase == "forming"
    assert [slot.state for slot in shown.slots] == ["launching", "vacant", "vacant"]


def test_agents_by_what_their_workers_do() -> None:
    story = Story().starting()

    assert [slot.state for slot in view(story.job).slots] == ["building"] * 3
    story.tell(exited("a1"))
    assert view(story.job).slots[1].state == "exited"


def test_a_job_that_waits_for_a_node() -> None:
    story = Story(standbys=0).training()
    story.tell(expired("a1"), reported("a0/0", 5))
    assert view(story.job).waiting is None

    story.tell(msgspec.structs.replace(reported("a2/0", 5), at=9.0))

    tried = ("1 ordered of the scheduler",)
    assert view(story.job).waiting == WaitView(since=9.0, slots=(1,), tried=tried)
    assert [each.kind for each in view(story.job).incidents] == ["failure"]


def test_a_planned_move() -> None:
    shown = view(Story().preparing().job)

    assert shown.move == MoveView(phase="preparing", leaver="n1", joiner="m0", epoch=2)
    assert shown.slots[1].state == "leaving"
    assert [each.state for each in shown.standbys] == ["joining"]


def test_a_planned_move_whose_agents_are_lost() -> None:
    leaver, joiner = Story().switching(), Story().switching()
    leaver.tell(verified("s0/0", 2, 5), expired("a1"))
    joiner.tell(expired("s0"))

    assert view(leaver.job).move == MoveView(phase="switching", leaver="", joiner="m0", epoch=2)
    assert view(joiner.job).move == MoveView(phase="revoked", leaver="n1", joiner="", epoch=2)


def test_a_leaver_that_is_not_released_yet_is_no_standby() -> None:
    job = Story().training().job

    assert view(dataclasses.replace(job, unreleased={1: "s0"})).standbys == ()


def test_a_move_that_waits_for_a_standby() -> None:
    story = Story(standbys=0).training()
    story.tell(requested("n1"))

    assert view(story.job).move == MoveView(phase="requested", leaver="n1", joiner="", epoch=0)


def test_a_failure() -> None:
    story = Story().training()
    story.tell(expired("a1"))

    shown = view(story.job)
    assert shown.phase == "revoked"
    assert shown.slots[1] == SlotView(slot=1, node="", agent="", state="lost")

    story.tell(reported("a0/0", 5), reported("a2/0", 5))
    shown = view(story.job)
    assert shown.phase == "switching"
    assert shown.epoch == 2
    assert shown.move == MoveView(phase="switching", leaver="", joiner="m0", epoch=2)
    assert shown.standbys == ()


def test_the_end() -> None:
    story = Story(standbys=1).training()
    story.tell(requested("n1"), CancelRequested(job="j", reason="enough"))

    shown = view(story.job)

    assert (shown.phase, shown.outcome, shown.code) == ("ended", "enough", 130)
    assert {slot.state for slot in shown.slots} == {"ended"}
    assert not shown.standbys
    assert shown.move is None


def test_the_loader_that_is_placed_most_slowly_is_shown() -> None:
    story = Story().starting()
    for worker, placing in (
        ("a0/0", Placing.STATE),
        ("a1/0", Placing.REPLAY),
        ("a2/0", Placing.NUMBER),
    ):
        story.tell(Looping(job="j", worker=worker, launch=1, schema=SCHEMA, placing=placing))

    assert view(story.job).placing == "replay"


def test_how_loaders_are_placed_is_not_known_before_the_loop() -> None:
    assert view(Story().starting().job).placing == ""


def test_on_how_many_nodes_copies_are_kept_is_shown() -> None:
    story = Story().training()
    assert (view(story.job).redundancy, view(story.job).copies) == ("", 0)

    story.tell(Sharing(job="j", worker="a0/0", launch=1, keepers=(), copies=2))

    assert (view(story.job).redundancy, view(story.job).copies) == ("copies", 2)
