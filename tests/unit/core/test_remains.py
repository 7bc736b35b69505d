"""What is kept of a job that has ended."""

from __future__ import annotations

import pytest

from support.jobs import Story, expired, joined, looping, reported
from tmover.core.events import AnyEvent, CancelRequested, MoveRequested
from tmover.core.job import Job, decide, resume, wake
from tmover.core.remains import remains
from tmover.core.view import view

CANCELLED = CancelRequested(job="j", reason="enough")


@pytest.fixture(params=["submitted", "training", "armed", "recovering"])
def ended(request: pytest.FixtureRequest) -> Job:
    story = Story()
    getattr(story, request.param)()
    story.tell(CANCELLED)
    return story.job


def test_what_people_are_shown_is_kept(ended: Job) -> None:
    assert view(remains(ended)) == view(ended)


def test_late_agents_are_told_the_same(ended: Job) -> None:
    kept = remains(ended)

    for agent in ("a0", "a1", "s0", "stranger"):
        assert resume(kept, agent) == resume(ended, agent)
        assert decide(kept, joined(agent, slot=0))[1] == decide(ended, joined(agent, slot=0))[1]
    assert wake(kept) == wake(ended)


@pytest.mark.parametrize(
    "event", [looping("a0/0"), expired("a0"), reported("a0/0", 5), CANCELLED,
              MoveRequested(job="j", node="n0", reason="x")],
)  # fmt: skip
def test_nothing_changes_it_any_more(ended: Job, event: AnyEvent) -> None:
    assert decide(remains(ended), event) == (remains(ended), [])


def test_what_ranks_tracked_is_not_kept() -> None:
    story = Story().training()
    story.tell(CANCELLED)

    kept = remains(story.job)

    assert kept.plan is not None
    assert (kept.plan.epoch, kept.plan.members, kept.schemas) == (1, (), {})
    assert not any(agent.schemas or agent.endpoints for agent in kept.agents.values())
    assert remains(kept) == kept


def test_a_job_that_has_not_ended_keeps_all() -> None:
    job = Story().training().job

    assert remains(job) is job
