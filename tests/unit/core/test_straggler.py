"""Who is slow, and what follows: fed with what ranks say of their own part of a step."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.jobs import Story, expired, left
from tmover.core.draft import LEFT_S, avoided
from tmover.core.events import MoveRequested, NodeReady, Straggling
from tmover.core.phase import Preparing, Training
from tmover.core.roster import Acts
from tmover.core.standby import candidates
from tmover.core.straggler import (
    ACTS,
    PAST,
    Against,
    Criteria,
    Load,
    OwnStatus,
    Watch,
    hindrance,
    look,
    sentence,
)

CRITERIA = Criteria(margin=1.3, for_s=120.0)
own_times = st.floats(0.001, 100.0)


def loads(*own_s: float, roles: str = "", nproc: int = 1) -> list[Load]:
    """Return what the ranks of a job say, one letter of `roles` each."""
    return [
        Load(rank, f"a{rank // nproc}", roles[rank] if roles else "r", each)
        for rank, each in enumerate(own_s)
    ]


def watched(
    said: list[Load], seconds: float, *, watch: Watch | None = None, epoch: int = 1, at: float = 0
) -> tuple[Watch, str | None]:
    """Return what is known after so long, looking once a second, and who is the straggler."""
    watch = watch or Watch()
    for second in range(int(seconds) + 1):
        watch = look(watch, epoch, said, CRITERIA, at=at + second)
    return watch, watch.certain(CRITERIA, at + int(seconds))


# --- beside peers ---------------------------------------------------------------------------------


def test_a_node_that_is_slower_than_its_peers_is_named_after_a_while() -> None:
    slow = loads(1.0, 1.0, 1.8)

    assert watched(slow, 119)[1] is None
    watch, found = watched(slow, 120)

    assert found == "a2"
    assert watch.found["a2"] == (1.8, 1.8, 1.0, Against.PEERS)
    assert watch.since == {"a2": 0}


@given(st.lists(st.floats(1.0, 1.3), min_size=3, max_size=8), own_times)
def test_nobody_is_slow_while_all_are_equal_up_to_the_margin(
    spread: list[float], base: float
) -> None:
    watch, found = watched(loads(*(base * factor for factor in spread)), 400)

    assert found is None
    assert not watch.since or max(watch.found[a].ratio for a in watch.since) < 1.3 + 1e-9


@given(own_times, st.integers(3, 8), st.data())
def test_the_slowed_one_is_named_and_nobody_else(
    base: float, nodes: int, data: st.DataObject
) -> None:
    slowed = data.draw(st.integers(0, nodes - 1))
    factor = data.draw(st.floats(1.31, 50.0))
    said = [base * factor if node == slowed else base for node in range(nodes)]

    watch, found = watched(loads(*said), 120)

    assert found == f"a{slowed}"
    assert set(watch.since) == {f"a{slowed}"}


@given(own_times, st.floats(1.0, 100.0), st.integers(2, 6))
def test_nobody_is_slow_when_all_become_slow_together(
    base: float, factor: float, nodes: int
) -> None:
    before, _ = watched(loads(*[base] * nodes), 130)

    _, found = watched(loads(*[base * factor] * nodes), 300, watch=before, at=131)

    assert found is None


def test_a_node_that_gets_well_again_is_not_named_and_one_that_nearly_does_is() -> None:
    slow, _ = watched(loads(1.0, 1.0, 1.8), 60)

    for now, found in ((1.2, "a2"), (1.14, None)):
        between, _ = watched(loads(1.0, 1.0, now), 10, watch=slow, at=61)
        assert watched(loads(1.0, 1.0, 1.8), 60, watch=between, at=72)[1] == found


def test_of_several_that_are_slow_the_worst_is_named() -> None:
    assert watched(loads(1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 2.0), 120)[1] == "a6"


def test_stages_that_have_more_to_do_are_no_stragglers() -> None:
    uneven = loads(1.0, 1.0, 1.0, 5.0, 5.0, 5.0, roles="fffrrr")
    assert watched(uneven, 200)[1] is None

    slow = loads(1.0, 1.0, 1.0, 5.0, 5.0, 9.0, roles="fffrrr")
    assert watched(slow, 200)[1] == "a5"


def test_a_node_is_as_slow_as_its_slowest_rank() -> None:
    watch, found = watched(loads(1.0, 1.0, 1.0, 1.0, 1.0, 1.9, nproc=2), 120)

    assert found == "a2"
    assert watch.found["a2"].own_s == 1.9


def test_all_begin_anew_in_another_world_and_where_nothing_is_said() -> None:
    slow = loads(1.0, 1.0, 1.8)
    before, _ = watched(slow, 100)

    assert watched(slow, 100, watch=before, epoch=2, at=101)[1] is None
    silent, found = watched([], 0, watch=before, at=101)
    assert found is None
    assert silent.found == {}
    assert watched(slow, 100, watch=silent, at=102)[1] is None


# --- beside one's own past ------------------------------------------------------------------------


def settled(*own_s: float, roles: str = "") -> Watch:
    """Return what is known of a job that has gone on like this for long enough."""
    watch, found = watched(loads(*own_s, roles=roles), 125)
    assert found is None
    assert all(len(past.values) == PAST for past in watch.past.values())
    return watch


def test_two_nodes_are_compared_with_their_own_past() -> None:
    watch, found = watched(loads(1.0, 3.4), 120, watch=settled(1.0, 2.0), at=126)

    assert found == "a1"
    finding = watch.found["a1"]
    assert (finding.own_s, finding.against) == (3.4, Against.PAST)
    assert (finding.ratio, finding.usual_s) == pytest.approx((1.7, 2.0))


def test_who_is_as_ever_is_not_slow_because_the_other_one_has_become_faster() -> None:
    assert watched(loads(1.0, 1.0), 200, watch=settled(1.0, 3.0), at=126)[1] is None


def test_a_stage_of_its_own_is_compared_with_its_past_beside_all_others() -> None:
    before = settled(1.0, 1.0, 4.0, roles="ffl")

    assert watched(loads(1.0, 1.0, 6.0, roles="ffl"), 120, watch=before, at=126)[1] == "a2"
    assert watched(loads(2.0, 2.0, 8.0, roles="ffl"), 120, watch=before, at=126)[1] is None


def test_without_peers_or_a_past_nothing_can_be_said() -> None:
    for said in (loads(1.0, 9.0), loads(5.0)):
        watch, found = watched(said, 60)
        assert found is None
        assert {finding.against for finding in watch.found.values()} == {Against.NOTHING}

    alone, _ = watched(loads(1.0), 130)
    assert watched(loads(9.0), 300, watch=alone, at=131)[1] is None


def test_a_joiner_has_a_past_of_its_own_and_the_others_keep_theirs() -> None:
    said = [Load(0, "a0", "r", 1.0), Load(1, "s0", "r", 5.0)]

    watch, found = watched(said, 10, watch=settled(1.0, 2.0), epoch=2, at=126)

    assert found is None
    assert len(watch.past["a0", 0].values) == PAST
    assert watch.found["s0"].against is Against.NOTHING
    assert ("a1", 1) not in watch.past


# --- what follows ---------------------------------------------------------------------------------


def slow(agent: str = "a1", *, act: bool = True, epoch: int = 1, at: float = 0.0) -> Straggling:
    return Straggling(job="j", agent=agent, epoch=epoch, reason="n1 is slow", act=act, at=at)


def test_a_straggler_is_moved_to_a_warm_standby() -> None:
    story = Story().training()

    notes = story.notes(slow(at=50.0))

    assert "n1 is to be left: n1 is slow" in notes
    assert isinstance(story.now(), Preparing)
    assert story.job.acted == {1: (1, 50.0)}
    assert story.job.slow == {"n1": 50.0}


def test_it_is_only_shown_where_that_is_asked_for() -> None:
    story = Story().training()

    assert story.notes(slow(act=False)) == ["n1 is slow: `tmover migrate n1` would move it"]
    assert isinstance(story.now(), Training)
    assert (story.job.requests, story.job.acted, story.job.slow) == ({}, {}, {})


@pytest.mark.parametrize("event", [slow(epoch=7), slow(epoch=0), slow("s0"), slow("stranger")])
def test_what_is_stale_or_of_a_stranger_changes_nothing(event: Straggling) -> None:
    story = Story().training()
    before = story.job

    assert story.hear(event) == []
    assert story.job == before


def test_nothing_is_moved_for_it_in_a_recovery_or_a_move() -> None:
    for story in (Story().revoked(), Story().preparing()):
        before = story.job
        assert story.hear(slow()) == []
        assert story.job == before


def test_without_a_warm_standby_it_is_said_why_it_is_not_moved() -> None:
    story = Story(standbys=0).training()

    why = "no standby is warm that could take its place"
    assert hindrance(story.job, "a1", 0.0) == why
    assert story.notes(slow()) == [f"n1 is slow: it is not moved, {why}"]
    assert isinstance(story.now(), Training)


def test_nothing_is_moved_for_it_while_another_node_waits_to_be_left() -> None:
    story = Story(standbys=0).training()
    story.hear(MoveRequested(job="j", node="n0", reason="fan"))

    assert hindrance(story.job, "a1", 0.0) == "another move is to be done first"


def test_a_slot_that_is_slow_on_every_node_is_not_moved_for_ever() -> None:
    story = Story().training()
    story.job = dataclasses.replace(story.job, acted={1: Acts(ACTS, 1000.0)})

    assert "what is slow is the slot" in hindrance(story.job, "a1", 1000.0 + LEFT_S - 1)
    assert "moved for that 2 times" in " ".join(story.notes(slow(at=1001.0)))
    assert isinstance(story.now(), Training)
    assert hindrance(story.job, "a0", 1001.0) == ""

    assert hindrance(story.job, "a1", 1000.0 + LEFT_S) == ""
    story.hear(slow(at=1000.0 + LEFT_S))
    assert story.job.acted[1].times == 1


def test_a_node_that_was_slow_is_no_standby_until_somebody_says_that_it_is_well() -> None:
    story = Story(standbys=2).training()
    story.job = dataclasses.replace(story.job, slow={"m0": 1.0})

    assert [agent.name for agent in candidates(story.job, 1)] == ["s1", "s0"]
    assert "m0" in avoided(story.job, at=1e9)

    story.hear(left("s1"))
    assert "no standby is warm" in hindrance(story.job, "a1", 2.0)
    assert story.notes(NodeReady(job="j", node="m0")) == ["m0 may be used again"]
    assert hindrance(story.job, "a1", 2.0) == ""


def test_a_straggler_whose_standby_is_lost_in_the_move_is_asked_to_leave_all_the_same() -> None:
    story = Story().training()
    story.hear(slow(at=1.0))
    story.hear(expired("s0"))

    assert list(story.job.requests) == ["n1"]
    assert story.hear(slow(at=2.0)) == []
    assert story.job.acted[1].times == 1


def test_it_is_told_in_one_sentence() -> None:
    status = OwnStatus(node="n3", own_ms=410.2, usual_ms=228.0, ratio=1.8, against="peers")

    assert sentence(status, "14:02") == (
        "n3 is 1.8 x slower than its peers since 14:02 (own 410 ms, peers 228 ms)"
    )
    past = OwnStatus(node="n3", own_ms=4.12, usual_ms=2.0, ratio=2.06, against="past")
    assert sentence(past, "14:02") == (
        "n3 is 2.1 x slower than it was (others are not) since 14:02 (own 4.1 ms, usual 2 ms)"
    )
