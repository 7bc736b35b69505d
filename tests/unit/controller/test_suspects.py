"""Jobs that stand still, as the controller sees them, with a clock that the test turns."""

from __future__ import annotations

import pytest

from support.jobs import Story
from tmover import wire
from tmover.config import ControllerConfig
from tmover.controller.presence import Presence, Who
from tmover.controller.stragglers import progress_of
from tmover.controller.suspects import Suspects
from tmover.core.events import Straggling, Stuck
from tmover.core.job import Job
from tmover.core.progress import Progress

CONFIG = ControllerConfig(stuck_s=60.0)
JOB = Story().training().job
AGENTS = JOB.slots


def heard(*awaits: tuple[int, ...], step: int = 10, ranks: tuple[int, ...] = ()) -> Presence:
    """Return the presence of agents whose workers wait for others; `ranks` they say to be."""
    presence = Presence(lease_s=5)
    for slot, (agent, those) in enumerate(zip(AGENTS, awaits, strict=True)):
        who = Who(JOB.name, agent)
        presence.join(who, f"n{slot}", b"r", now=0)
        said = Progress(
            rank=ranks[slot] if ranks else slot,
            step=step,
            activity="step",
            awaits=those,
            median_s=1.0,
        )
        beat = wire.Heartbeat(job=JOB.name, agent=agent, progress=(said,))
        presence.beat(who, beat)
    return presence


def watched(
    presence: Presence, seconds: int, job: Job = JOB
) -> tuple[Suspects, list[Stuck | Straggling]]:
    suspects = Suspects(CONFIG, presence)
    found = [stuck for now in range(seconds + 1) for stuck in suspects.look([job], now)]
    return suspects, found


HUNG = ((1,), (), (1,))


def test_the_node_that_all_wait_for_is_named_once() -> None:
    suspects, found = watched(heard(*HUNG), 90)

    reason = "no step for 60 s of 60 s, all wait for rank 1"
    assert found == [Stuck(job="j", agent="a1", epoch=1, reason=reason)]
    assert str(suspects.of("j")) == "no step for 90 s of 60 s, all wait for rank 1"


def test_before_that_it_is_shown_and_nothing_is_done() -> None:
    suspects, found = watched(heard(*HUNG), 59)

    assert found == []
    assert "all wait for rank 1" in str(suspects.of("j"))


@pytest.mark.parametrize("awaits", [((1,), (0,), (1,)), ((), (), (0, 1))])
def test_nobody_is_given_up_where_it_is_not_certain_which_node_it_is(
    awaits: tuple[tuple[int, ...], ...],
) -> None:
    _, found = watched(heard(*awaits), 90)

    assert found == []


def test_a_job_is_not_watched_in_a_recovery() -> None:
    job = Story().revoked().job
    suspects, found = watched(heard(*HUNG), 90, job)

    assert found == []
    assert suspects.of("j") is None


def test_a_job_of_which_not_all_ranks_are_heard_is_not_suspected() -> None:
    presence = heard(*HUNG, ranks=(0, 1, 7))  # a standby's last word from where it was before

    suspects, found = watched(presence, 90)

    assert set(progress_of(JOB, presence)) == {0, 1}
    assert found == []
    assert suspects.of("j") is None


def test_a_controller_that_stood_still_itself_begins_anew() -> None:
    suspects, _ = watched(heard(*HUNG), 50)

    assert suspects.look([JOB], 500.0) == []
    assert suspects.of("j") is None
