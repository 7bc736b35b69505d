"""Which node is slow, as the controller gathers it from heartbeats; the test turns the clocks."""

from __future__ import annotations

import dataclasses

import pytest

from support.jobs import Story
from tmover import wire
from tmover.config import ControllerConfig
from tmover.controller.presence import Presence, Who
from tmover.controller.stragglers import Stragglers
from tmover.core.events import CancelRequested, Straggling
from tmover.core.progress import Progress
from tmover.core.roster import Acts, Job
from tmover.core.straggler import Mode

WALL = 1_000_000.0
SLOW = (1.0, 1.8, 1.0)


class Eyes:
    """Looks once a second at a job whose ranks always say the same."""

    def __init__(self, mode: Mode, job: Job, own_s: tuple[float, ...] = SLOW) -> None:
        self.now = 0.0
        self.presence = Presence(lease_s=5)
        config = ControllerConfig(stragglers=mode.value, straggler_cooldown_s=600.0)
        self.stragglers = Stragglers(config, self.presence, lambda: WALL + self.now)
        self.job = job
        self.hear(*own_s)

    def hear(self, *own_s: float, epoch: int = 1) -> None:
        for slot, agent in enumerate(self.job.slots):
            who = Who(self.job.name, agent)
            self.presence.join(who, f"n{slot}", b"r", now=0)
            said = Progress(rank=slot, step=10, own_s=own_s[slot], epoch=epoch)
            beat = wire.Heartbeat(job=self.job.name, agent=agent, progress=(said,))
            self.presence.beat(who, beat)

    def after(self, seconds: int) -> list[Straggling]:
        found: list[Straggling] = []
        for _ in range(seconds):
            self.now += 1
            found += self.stragglers.look(self.job, self.now)
        return found


TRAINING = Story().training().job
ALONE = Story(standbys=0).training().job


def test_a_straggler_is_proposed_once_and_shown_for_as_long_as_it_is_one() -> None:
    eyes = Eyes(Mode.OBSERVE, TRAINING)

    assert eyes.after(120) == []
    assert eyes.stragglers.sentence("j") == ""
    (found,) = eyes.after(300)

    assert (found.agent, found.epoch, found.act, found.hindrance) == ("a1", 1, False, "")
    assert found.reason.startswith("n1 is 1.8 x slower than its peers since ")
    assert found.reason.endswith(" (own 1800 ms, peers 1000 ms)")
    assert eyes.stragglers.sentence("j") == f"{found.reason}: `tmover migrate n1` would move it"

    eyes.hear(1.0, 1.0, 1.0)
    assert eyes.after(1) == []
    assert eyes.stragglers.sentence("j") == ""


def test_status_has_what_every_node_takes() -> None:
    eyes = Eyes(Mode.OBSERVE, TRAINING)
    eyes.after(130)

    shown = {one.node: one for one in eyes.stragglers.of("j")}

    assert list(shown) == ["n0", "n1", "n2"]
    slow, well = shown["n1"], shown["n0"]
    assert (slow.own_ms, slow.usual_ms, slow.ratio, slow.against) == (1800, 1000, 1.8, "peers")
    assert (slow.since, slow.is_straggler) == (WALL + 1, True)
    assert (well.own_ms, well.since, well.is_straggler) == (1000, 0, False)


def test_it_is_to_be_moved_where_that_is_asked_for() -> None:
    eyes = Eyes(Mode.ACT, TRAINING)

    (found,) = eyes.after(400)

    assert (found.agent, found.act) == ("a1", True)
    assert eyes.stragglers.sentence("j") == f"{found.reason}: it is to be moved"


def test_it_is_moved_as_soon_as_a_standby_is_warm() -> None:
    eyes = Eyes(Mode.ACT, ALONE)

    (found,) = eyes.after(200)
    why = "no standby is warm that could take its place"
    assert (found.act, found.hindrance) == (False, why)
    assert eyes.stragglers.sentence("j") == f"{found.reason}: it is not moved, {why}"
    eyes.job = TRAINING
    (found,) = eyes.after(200)
    assert (found.act, found.hindrance) == (True, "")


def test_it_is_moved_no_more_often_than_set() -> None:
    acted = {2: Acts(1, WALL - 300)}
    eyes = Eyes(Mode.ACT, dataclasses.replace(TRAINING, acted=acted))

    (found,) = eyes.after(299)
    assert not found.act
    assert found.hindrance == "a straggler was moved less than 600 s ago"
    (found,) = eyes.after(2)
    assert found.act


def test_nobody_looks_where_that_is_not_wanted() -> None:
    eyes = Eyes(Mode.OFF, TRAINING)

    assert eyes.after(300) == []
    assert eyes.stragglers.of("j") == ()


@pytest.mark.parametrize(
    "job",
    [
        Story().preparing().job,
        Story().revoked().job,
        Story(standbys=0).preparing().job,  # a move is asked for, and waits
    ],
)
def test_nothing_is_found_while_a_move_or_a_recovery_is_under_way(job: Job) -> None:
    eyes = Eyes(Mode.ACT, job)

    assert eyes.after(300) == []
    assert eyes.stragglers.of("j") == ()


@pytest.mark.parametrize("said", [{"epoch": 0}, {"epoch": 7}])
def test_what_was_said_of_another_world_does_not_count(said: dict[str, int]) -> None:
    eyes = Eyes(Mode.ACT, TRAINING)
    eyes.hear(*SLOW, **said)

    assert eyes.after(300) == []


def test_nothing_is_found_before_all_have_said_how_they_do() -> None:
    eyes = Eyes(Mode.ACT, TRAINING)
    eyes.hear(1.0, 1.8, 0.0)

    assert eyes.after(300) == []


def test_time_in_which_nobody_looked_does_not_count() -> None:
    eyes = Eyes(Mode.ACT, TRAINING)
    eyes.after(100)

    eyes.stragglers.forget()

    assert eyes.after(100) == []
    assert len(eyes.after(21)) == 1


def test_an_ended_job_is_forgotten() -> None:
    eyes = Eyes(Mode.OBSERVE, TRAINING)
    eyes.after(130)
    story = Story()
    story.job = TRAINING

    story.hear(CancelRequested(job="j", reason="x"))
    eyes.job = story.job

    assert eyes.after(1) == []
    assert eyes.stragglers.of("j") == ()
    assert eyes.stragglers.sentence("j") == ""
