"""What is kept of moves and failures: derived from events, and bounded."""

import msgspec

from support.jobs import (
    Story,
    entered,
    exited,
    expired,
    joined,
    launched,
    overdue,
    passed,
    prepared,
    reported,
    requested,
    verified,
    warm,
)
from tmover.core import timeline
from tmover.core.events import AnyEvent, NodeLost, Stepped, Stored, Wait
from tmover.core.incident import Handing, Incident, Lost


def at(story: Story, *events: AnyEvent) -> None:
    """Tell the events one second after the other, from second 10 on."""
    for second, event in enumerate(events, start=10):
        story.hear(msgspec.structs.replace(event, at=float(second)))


def marks(incident: Incident) -> list[tuple[str, float]]:
    return [(mark.name, mark.at) for mark in incident.marks]


def stepped(epoch: int) -> Stepped:
    return Stepped(job="j", worker="a0/0", epoch=epoch, step=6)


def test_a_job_that_forms_and_trains_has_no_incident() -> None:
    assert Story().training().job.incidents == ()


def test_a_failure_with_a_warm_standby_has_its_times() -> None:
    story = Story().training()

    at(
        story,
        exited("a1", reason="killed"),
        reported("a0/0", 5),
        reported("a2/0", 5),
        msgspec.structs.replace(verified("s0/0", 2, 5), connect_s=0.5, receive_s=0.25),
        passed("a0/0", 2, 5),
        passed("a2/0", 2, 5),
        passed("s0/0", 2, 5),
        stepped(2),
    )

    (found,) = story.job.incidents
    assert (found.kind, found.began, found.cause, found.epoch) == ("failure", 10.0, "n1: killed", 1)
    assert marks(found) == [
        ("lost named", 10.0),
        ("decided", 12.0),
        ("handed over", 13.0),
        ("passed", 16.0),
        ("first step", 17.0),
    ]
    assert found.handings == (Handing(1, "n1", "m0", "standby"),)
    assert (found.lost, found.into) == ((Lost("n1", "killed"),), 2)
    assert found.outcome == "recovered"
    assert (found.connect_s, found.receive_s) == (0.5, 0.25)


def test_a_wait_for_a_node_that_is_ordered_has_its_times() -> None:
    story = Story(standbys=0).training()

    at(
        story,
        NodeLost(job="j", node="n1", reason="down"),
        reported("a0/0", 5),
        reported("a2/0", 5),
        joined("s0"),
        launched("s0"),
        warm("s0/0"),
        *[passed(worker, 2, 5) for worker in ("a0/0", "a2/0", "s0/0")],
    )

    (found,) = story.job.incidents
    assert [name for name, _ in marks(found)] == [
        "lost named", "waiting", "node ordered", "node came", "workers up", "warm", "decided",
        "passed",
    ]  # fmt: skip
    assert found.cause == "n1: down"
    assert found.handings == (Handing(1, "n1", "m0", "new node"),)


def test_workers_that_begin_again_on_their_node_have_their_path() -> None:
    story = Story(standbys=0).revoked("a1")

    at(story, reported("a0/0", 5), reported("a2/0", 5), launched("a1", 2), warm("a1/0", 2))
    story.hear(*[passed(worker, 2, 5) for worker in ("a0/0", "a1/0", "a2/0")])

    (found,) = story.job.incidents
    assert found.handings == (Handing(1, "n1", "n1", "same node"),)
    assert ("workers started again", 11.0) in marks(found)
    assert "node ordered" not in dict(marks(found))


def test_a_move_that_is_called_off_says_so() -> None:
    story = Story().preparing()

    story.hear(expired("s0"))

    (found,) = story.job.incidents
    assert (found.kind, found.outcome, found.into) == ("move", "called off", 0)


def test_a_move_that_is_tried_again_with_another_standby_is_one_incident() -> None:
    story = Story(standbys=2).training()

    at(story, requested("n1"))
    story.hear(expired("s0"))
    at(story, *[prepared(f"{agent}/0", 3) for agent in ("a0", "a1", "a2", "s1")])
    at(
        story,
        entered("a0/0", 3, 5),
        verified("s1/0", 3, 5),
        *[passed(worker, 3, 5) for worker in ("a0/0", "a2/0", "s1/0")],
    )

    (moved,) = story.job.incidents
    assert moved.cause == "n1: maintenance"
    assert (moved.kind, moved.outcome, moved.into, moved.lost) == ("move", "moved", 3, ())
    assert moved.handings == (Handing(1, "n1", "m1", "standby"),)
    names = [name for name, _ in marks(moved)]
    assert names == [
        "decided",
        "called off",
        "decided",
        "armed",
        "at the boundary",
        "handed over",
        "passed",
    ]


def test_a_wait_that_ends_the_job_says_so() -> None:
    story = Story(standbys=0).training()
    story.hear(expired("a1"), reported("a0/0", 5), reported("a2/0", 5), overdue(Wait.NODE, 1))

    story.hear(Stored(job="j", worker="a0/0", epoch=2, step=5))

    (found,) = story.job.incidents
    assert "storing" in dict(marks(found))
    assert found.outcome.startswith("ended with 75: no node came in time for slot 1; a checkpoint")


def test_what_comes_late_or_twice_is_in_no_incident() -> None:
    story = Story().recovering()
    story.hear(*[passed(worker, 2, 5) for worker in ("a0/0", "a2/0", "s0/0")], stepped(2))
    before = story.job.incidents

    story.hear(stepped(2), stepped(1), verified("s0/0", 2, 5), passed("a0/0", 2, 5))

    assert story.job.incidents == before


def test_so_many_are_kept_and_no_more() -> None:
    story = Story(standbys=0).training()

    for _ in range(timeline.KEPT + 3):
        agent = story.job.agents["a1"]
        worker, step = "a1/0", story.job.in_force + 5
        story.hear(exited("a1", agent.launch))
        of = story.job.in_force
        story.hear(reported("a0/0", step, of=of), reported("a2/0", step, of=of))
        launch = agent.launch + 1
        story.hear(launched("a1", launch), warm(worker, launch))
        into = story.job.in_force
        story.hear(*[passed(each, into, step) for each in ("a0/0", "a1/0", "a2/0")])
        fresh = story.job.agents["a1"]
        story.job = story.with_agent(fresh, failures=0)

    numbers = [incident.number for incident in story.job.incidents]
    assert numbers == list(range(4, timeline.KEPT + 4))
