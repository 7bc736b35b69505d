"""Several nodes are left at once, and a node that was left is used again."""

from support.jobs import Story, expired, joined, requested
from tmover.core.events import MoveRequested, NodeReady
from tmover.core.orders import EndNode, OrderNode, Stop
from tmover.core.phase import Preparing, Training


def leave(*nodes: str) -> MoveRequested:
    return MoveRequested(job="j", node=nodes[0], reason="maintenance", more=nodes[1:])


def moves(story: Story) -> dict[int, str]:
    """Return which slot the move under way gives to which agent."""
    phase = story.now()
    assert isinstance(phase, Preparing), phase
    return {slot: phase.move.slots[slot] for slot in phase.move.leavers}


def test_several_nodes_are_left_in_one_move() -> None:
    story = Story(standbys=2).training()

    story.tell(leave("n2", "n0"))

    assert moves(story) == {2: "s0", 0: "s1"}


def test_with_too_few_standbys_who_was_named_first_is_left_first() -> None:
    story = Story(standbys=1).training()

    story.tell(leave("n2", "n0"))

    assert moves(story) == {2: "s0"}
    assert list(story.job.requests) == ["n2", "n0"]


def test_a_standby_that_is_to_be_left_is_no_joiner() -> None:
    story = Story(standbys=2).training()

    actions = story.tell(leave("n1", "m0"))

    assert moves(story) == {1: "s1"}
    assert [stop.agent for stop in actions if isinstance(stop, Stop)] == ["s0"]


def test_with_no_other_standby_one_is_ordered_elsewhere() -> None:
    story = Story(standbys=1).training()

    actions = story.tell(leave("n1", "m0"))

    assert story.now() == Training()
    (order,) = [action for action in actions if isinstance(action, OrderNode)]
    assert {"m0", "n1"} <= set(order.exclude)


def test_asking_for_several_again_changes_nothing() -> None:
    story = Story(standbys=2).training()
    story.tell(leave("n2", "n0"))
    before = story.job

    assert story.tell(leave("n0", "n2")) == []
    assert story.job == before


def test_what_the_job_is_not_on_is_said_and_left_out() -> None:
    story = Story().training()

    notes = story.notes(leave("x9", "n1"))

    assert "x9 carries nothing of this job: nothing to move" in notes
    assert list(story.job.requests) == ["n1"]


def _left_standby(node: str = "m0") -> Story:
    story = Story(standbys=1).training()
    story.tell(requested(node))
    assert node in story.job.left
    return story


def _excluded(story: Story) -> set[str]:
    """Return the nodes that the next standby may not be on."""
    actions = story.tell(leave("n1"))
    return {node for action in actions if isinstance(action, OrderNode) for node in action.exclude}


def test_a_node_that_was_left_is_not_asked_for_until_it_is_ready() -> None:
    assert "m0" in _excluded(_left_standby())

    ready = _left_standby()
    assert ready.notes(NodeReady(job="j", node="m0")) == ["m0 may be used again"]
    assert "m0" not in _excluded(ready)


def test_a_lost_node_that_is_ready_is_asked_for_again() -> None:
    story = Story(standbys=2).training()
    assert any(isinstance(action, EndNode) for action in story.tell(expired("s0")))
    assert story.job.left.keys() == {"m0"}

    story.tell(NodeReady(job="j", node="m0"))

    assert story.job.left == {}


def test_a_node_that_waits_to_be_left_stays_once_it_is_ready() -> None:
    story = Story(standbys=0).training()
    story.tell(requested("n1"))

    story.tell(NodeReady(job="j", node="n1"))
    story.tell(joined("s0"))
    story.warmed("s0")

    assert story.job.requests == {}
    assert story.now() == Training()


def test_a_move_that_has_begun_goes_on() -> None:
    story = Story().preparing()
    before = story.job

    notes = story.notes(NodeReady(job="j", node="n1"))

    assert notes == ["n1 is being left: it can be used again after the move, ask then"]
    assert story.job == before


def test_of_a_node_nobody_knows_nothing_follows() -> None:
    story = Story().training()
    before = story.job

    assert story.hear(NodeReady(job="j", node="x9")) == []
    assert story.job == before
