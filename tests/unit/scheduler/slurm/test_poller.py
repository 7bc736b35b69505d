import pytest

from support.fake_slurm import FakeSlurm
from tmover.errors import SlurmUnreachable
from tmover.scheduler.slurm.client import SlurmClient
from tmover.scheduler.slurm.poller import Poller


class Polled:
    """A poller of a fake Slurm, and how often that was asked for its jobs or pinged in vain."""

    def __init__(self) -> None:
        self.fake = FakeSlurm(2)
        self.now = 100.0
        client = SlurmClient(self.fake, clock=lambda: self.now)
        self.poller = Poller(client, poll_s=10, most_s=60)

    def at(self, now: float) -> bool:
        """Ask at a time; return whether Slurm was asked then."""
        self.now, before = now, len(self.fake.commands)
        try:
            self.poller.snapshot(now)
        except SlurmUnreachable:
            assert not self.fake.is_up
        return len(self.fake.commands) > before


def test_a_fresh_snapshot_is_not_taken_again() -> None:
    polled = Polled()

    first = polled.poller.snapshot(100.0)

    assert [node.name for node in first.nodes] == ["node1", "node2"]
    assert polled.poller.snapshot(109.9) is first
    assert polled.poller.snapshot(110.0).at == 110.0


def test_a_nudge_asks_early_and_once_a_second_at_most() -> None:
    polled = Polled()
    assert polled.at(100.0)

    polled.poller.nudge()

    assert not polled.at(100.9)
    assert polled.at(101.0)
    assert not polled.at(105.0)


def test_while_nothing_is_known_no_old_snapshot_is_shown() -> None:
    polled = Polled()
    polled.at(100.0)
    polled.fake.is_up = False

    for now in (110.0, 112.0):
        with pytest.raises(SlurmUnreachable):
            polled.poller.snapshot(now)


def test_a_slurmctld_that_is_down_is_asked_half_as_often_each_time() -> None:
    polled = Polled()
    polled.fake.is_up = False

    asked = [now for now in range(100, 400) if polled.at(float(now))]

    assert asked == [100, 110, 130, 170, 230, 290, 350]


def test_after_an_answer_the_usual_pace_returns() -> None:
    polled = Polled()
    polled.fake.is_up = False
    for now in (100.0, 110.0, 130.0):
        assert polled.at(now)
    polled.fake.is_up = True

    polled.poller.nudge()

    assert polled.at(131.0)
    assert not polled.at(140.9)
    assert polled.at(141.0)


def test_a_poll_costs_five_requests() -> None:
    fake = FakeSlurm(2)
    client = SlurmClient(fake, clock=lambda: 0.0)

    Poller(client).snapshot(0.0)

    assert client.rpcs_per_minute() == 5
