"""What a process waits for at the end of a step: that nothing of its groups is under way."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from tmover.comm.timeouts import Timeouts
from tmover.comm.world import WORLD, Running, World
from tmover.errors import CallError, LinkError


def settle(groups: Mapping[str, Running], world: World | None, timeouts: Timeouts) -> None:
    """Wait until no collective or message of these groups is under way.

    A message cannot outlive its step: the rank at its other end may be another process in the next.
    So one is refused whose other end has voted already, and that is not here a while later.
    Raises `CallError` for it, `LinkError` if anything else does not end in time.
    """
    deadline = time.monotonic() + timeouts.collective_s
    for name, group in groups.items():
        suspect = ""
        while not group.settle_messages(min(timeouts.unacked_s, _left(deadline))):
            stray = "" if world is None else group.stray(_ended(world))
            if stray and stray == suspect:
                msg = (
                    f"{stray} was under way at the end of the step, which its other end has ended "
                    "too: send and receive a message within one step"
                )
                raise CallError(msg)
            suspect = stray
            if time.monotonic() >= deadline:
                msg = f"{stray or 'messages'} of group {name} did not end in time"
                raise LinkError(msg)
        if not group.settle(_left(deadline)):  # in one wait: what is torch's cannot bear several
            msg = f"collectives of group {name} did not end in time"
            raise LinkError(msg)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _ended(world: World) -> Collection[int]:
    """Return the ranks that are at the end of the step, as far as their votes have come."""
    votes = world.meshes[WORLD]
    return [world.own_rank, *(rank for rank in votes.peers if votes.link(rank).is_readable)]
