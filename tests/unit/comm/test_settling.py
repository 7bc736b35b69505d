"""What is waited for at the end of a step, and in how many pieces."""

from __future__ import annotations

import pytest

from tmover.comm.settling import settle
from tmover.comm.timeouts import Timeouts
from tmover.errors import LinkError

TIMEOUTS = Timeouts(collective_s=1000.0, unacked_s=0.5)


class Busy:
    """A group whose messages take some looks, and whose collectives end, or do not."""

    ranks: tuple[int, ...] = (0, 1)
    timeout_s = 1.0

    def __init__(self, looks: int, *, ends: bool) -> None:
        self.looks = looks
        self.ends = ends
        self.waits: list[float] = []

    def settle_messages(self, timeout_s: float) -> bool:
        assert timeout_s <= TIMEOUTS.unacked_s
        self.looks -= 1
        return self.looks < 0

    def settle(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.ends

    def stray(self, ended: object) -> str:
        return ""

    def close(self) -> None:
        return


def test_collectives_are_waited_for_once_with_all_the_time_there_is() -> None:
    """A communicator of torch's takes a wait that was too short for a failure."""
    group = Busy(3, ends=True)

    settle({"g": group}, None, TIMEOUTS)

    (waited,) = group.waits
    assert waited > TIMEOUTS.collective_s / 2


def test_collectives_that_do_not_end_are_named_by_their_group() -> None:
    with pytest.raises(LinkError, match="collectives of group g did not end in time"):
        settle({"g": Busy(0, ends=False)}, None, TIMEOUTS)
