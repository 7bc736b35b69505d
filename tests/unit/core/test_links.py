"""Which links are opened afresh after a barrier that some have passed and others have not."""

from __future__ import annotations

import pytest

from support.jobs import Story, broken, exited, expired, overdue, passed, reported, verified
from tmover.core.events import Answered, AnyEvent, Broken, Reported, Wait
from tmover.core.job import decide, resume
from tmover.core.orders import Action, Assign
from tmover.core.phase import Recovering

Pairs = set[tuple[str, str]]
STAYERS = ("a0", "a2")


def relinked(actions: list[Action]) -> Pairs:
    """Return whose links the assignments among `actions` open afresh: the same for everybody."""
    found = {order.relink for order in actions if isinstance(order, Assign)}
    assert len(found) == 1, found
    return set(found.pop())


def halfway(*entered: str, planned: bool = True) -> tuple[Story, list[Action]]:
    """Return a job whose switch to epoch 2, with `s0` in slot 1, only these agents have passed."""
    story = Story(standbys=2)
    if planned:
        story.switching().tell(verified("s0/0", 2, 5))
    else:
        story.recovering().tell(verified("s0/0", 2, 5))
    story.tell(broken("a0/0", "a2/0", epoch=2))
    story.tell(*[Answered(job="j", agent=agent, probe=2) for agent in STAYERS])
    story.tell(overdue(Wait.ACCUSE, 2))
    return story, story.tell(*reports(*entered, planned=planned))


def reports(*entered: str, planned: bool = True) -> list[Reported]:
    before = {"a0": 1, "a2": 1, "s0": 0, **({"a1": 1} if planned else {})}
    return [
        reported(f"{agent}/0", 5, of=2, epoch=2 if agent in entered else epoch)
        for agent, epoch in before.items()
    ]


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "failure"])
def test_a_stayer_that_alone_has_passed_is_linked_afresh_to_the_joiner(*, planned: bool) -> None:
    _, actions = halfway("a0", planned=planned)

    assert {("a0/0", "s0/0")} <= relinked(actions)


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "failure"])
def test_a_joiner_that_alone_has_passed_is_linked_afresh_to_all(*, planned: bool) -> None:
    _, actions = halfway("s0", planned=planned)

    assert relinked(actions) == {("a0/0", "a2/0"), ("a0/0", "s0/0"), ("a2/0", "s0/0")}


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "failure"])
def test_stayers_use_the_link_again_that_they_had_before(*, planned: bool) -> None:
    """Whichever of them has passed: it was open in both worlds."""
    story = Story(standbys=2)
    (story.switching() if planned else story.recovering()).tell(verified("s0/0", 2, 5))
    story.tell(Broken(job="j", worker="s0/0", epoch=2, peers=(), reason="told to by nobody"))
    story.tell(overdue(Wait.ACCUSE, 2))

    assert relinked(story.tell(*reports("a0", planned=planned))) == {
        ("a0/0", "s0/0"),
        ("a2/0", "s0/0"),
    }


def test_pairs_that_have_passed_together_use_their_links_again() -> None:
    _, actions = halfway("a0", "s0")

    assert relinked(actions) == {("a0/0", "a2/0"), ("a2/0", "s0/0")}


def test_once_all_have_passed_no_link_is_opened_afresh() -> None:
    story, _ = halfway("a0")
    story.tell(*[passed(f"{agent}/0", 3, 5) for agent in (*STAYERS, "s0")])
    assert story.job.opened == {}
    story.tell(expired("a2"))

    actions = story.tell(*[reported(f"{agent}/0", 5, of=3) for agent in ("a0", "s0")])

    assert relinked(actions) == set()


def test_a_link_that_only_one_end_has_counts_as_broken_for_nobody() -> None:
    """The next break of it is its first, and costs no node."""
    story, _ = halfway("a0")

    assert story.job.relinked.keys() == {("a0", "a2")}


def test_a_broken_link_is_due_again_if_the_world_it_was_opened_for_is_given_up() -> None:
    story = Story(standbys=2).training()
    story.tell(broken("a2/0", "a0/0"))
    story.tell(*[Answered(job="j", agent=agent, probe=1) for agent in STAYERS])
    story.tell(overdue(Wait.ACCUSE, 1))
    first = story.tell(*[reported(f"{agent}/0", 5) for agent in story.members])
    assert relinked(first) == {("a2/0", "a0/0")}
    story.tell(exited("a1"))

    second = story.tell(*[reported(f"{a}/0", 5, of=2, epoch=1) for a in STAYERS])

    assert relinked(second) == {("a0/0", "a2/0")}
    story.tell(*[passed(f"{agent}/0", 3, 5) for agent in (*STAYERS, "s0")], exited("s0"))
    third = story.tell(*[reported(f"{agent}/0", 5, of=3) for agent in STAYERS])
    assert relinked(third) == set()


def test_a_leaver_taken_back_comes_into_the_next_world_as_a_joiner_does() -> None:
    """It was not in the one before, so one that joined that has no link to it yet."""
    story = Story(standbys=2).switching()

    story.tell(verified("s0/0", 2, 5), exited("s0"), *reports("a0"))

    assert story.job.slots == ("a0", "a1", "a2")
    assert dict(story.job.opened).items() >= {("a0/0", "a1/0"): 3, ("a1/0", "a2/0"): 3}.items()


def test_late_and_repeated_reports_change_nothing() -> None:
    story, actions = halfway("a0")
    assert isinstance(story.job.phase, Recovering)
    job = story.job

    late: list[AnyEvent] = [
        *reports("a0"),
        *reports("a0", "a2", "s0"),
        reported("a0/0", 5, of=1),
        reported("a2/0", 9, of=1),
        broken("a2/0", "s0/0", epoch=2),
    ]

    for event in late:
        assert decide(job, event) == (job, [])
    again: list[Action] = [order for agent in (*STAYERS, "s0") for order in resume(job, agent)]
    assert relinked(again) == relinked(actions)
