"""A job whose ranks go on from a checkpoint on storage: its first step is not step 0."""

from __future__ import annotations

import pytest

from support.jobs import SCHEMA, Story, exited, launched, reported
from tmover.core import rank as rules
from tmover.core.events import Looping
from tmover.core.orders import Note
from tmover.core.phase import Ended, Forming
from tmover.core.rank import Rank

SAVED = 40


def begin(story: Story, launch: int = 1) -> None:
    """Let all workers come up, and enter their loops behind the checkpoint."""
    story.tell(*[launched(agent, launch) for agent in story.members])
    for agent in story.members:
        worker = f"{agent}/0"
        story.tell(Looping(job="j", worker=worker, launch=launch, schema=SCHEMA, step=SAVED))


def resumed() -> Story:
    story = Story().joined()
    begin(story)
    story.warmed("s0")
    return story


def lost_at(*steps: int) -> list[str]:
    """Return what is noted when a member is lost and the others stand at these steps."""
    story = resumed()
    story.tell(exited("a1"))
    found = story.hear(
        *[reported(f"{agent}/0", step) for agent, step in zip(("a0", "a2"), steps, strict=True)]
    )
    return [action.text for action in found if isinstance(action, Note)]


def test_a_rank_votes_first_on_the_step_after_its_checkpoint() -> None:
    rank = rules.resume(Rank(epoch=1), SAVED)

    voted, vote = rules.cast(rank, SAVED + 1, good=True)

    assert (voted.step, voted.doubt, vote.step) == (SAVED, SAVED + 1, SAVED + 1)


@pytest.mark.parametrize(("step", "armed"), [(SAVED + 1, 0), (SAVED + 2, 2)])
def test_a_world_changes_hands_only_after_the_second_step_of_the_run(step: int, armed: int) -> None:
    rank = rules.resume(Rank(epoch=1, armed=2), SAVED)

    _, vote = rules.cast(rules.applied(rank, step - 1), step, good=True)

    assert vote.armed == armed


@pytest.mark.parametrize("steps", [(-1, SAVED), (SAVED, SAVED), (SAVED + 1, SAVED)])
def test_a_loss_before_the_second_step_of_the_run_starts_all_afresh(steps: tuple[int, int]) -> None:
    assert "it had hardly begun: all workers start afresh" in lost_at(*steps)


def test_a_loss_after_the_second_step_of_the_run_does_not() -> None:
    assert f"epoch 2 begins after step {SAVED + 2}" in lost_at(SAVED + 2, SAVED + 2)


def test_a_script_that_fails_before_the_first_step_of_a_resumed_run_is_given_up() -> None:
    story = resumed()

    for launch, epoch in ((1, 1), (2, 2)):
        story.tell(exited("a1", launch, code=1, reason="ValueError"))
        story.tell(*[reported(f"{agent}/0", SAVED, of=epoch) for agent in ("a0", "a2")])
        if isinstance(story.job.phase, Forming):
            begin(story, launch + 1)

    assert isinstance(story.job.phase, Ended)
    assert "the script failed twice" in story.job.phase.reason
