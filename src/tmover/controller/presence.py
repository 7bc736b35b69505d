"""Which agents are heard of, and where they are reached. Knows no socket and no clock.

An agent's lease runs from the last message heard; what it says is no matter. Its route is the
connection it joined over: a message over another one means that the connection broke and messages
may have been lost, so the agent is asked to join again, as by a controller that was restarted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from tmover import wire
from tmover.core.events import Answered, Exited, Joined, Launched, Left
from tmover.core.progress import Progress

RETURN_S = 60.0
"""For so long at most agents that have yet to come back are not missed while others do."""
_EACH_S = 0.001
"""How long an agent that comes back may keep the next one waiting."""
ASK_AGAIN_S = 1.0
"""An agent is not asked who it is more often than this."""


class Who(NamedTuple):
    """An agent of a job."""

    job: str
    agent: str


def speaker(event: wire.FromNode | wire.Heartbeat) -> Who:
    """Return the agent that something comes from."""
    if isinstance(event, (Joined, Launched, Exited, Left, Answered, wire.Heartbeat, wire.Program)):
        return Who(event.job, event.agent)
    return Who(event.job, wire.agent_of(event.worker))


@dataclasses.dataclass
class Seen:
    """What is known of one agent's presence. `route` is None until it joins this controller."""

    node: str
    heard: float
    route: bytes | None = None
    is_leaving: bool = False
    """It was told to stop, so its silence is no news."""
    steps: tuple[int, ...] = ()
    progress: tuple[Progress | None, ...] = ()
    has_spoken: bool = False
    """It was heard of by this controller, not only in the journal."""


class Presence:
    """The agents of all jobs. Times are the caller's, in seconds."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._agents: dict[Who, Seen] = {}
        self._returned = -RETURN_S
        """When an agent of the journal was heard of last for the first time."""
        self._began = -RETURN_S
        self._asked: dict[Who, float] = {}

    def join(self, who: Who, node: str, route: bytes | None, now: float) -> None:
        """Note that the agent has joined over `route`; None if the journal says so."""
        self._asked.pop(who, None)
        seen = self._agents.get(who)
        spoken = route is not None
        if seen is None:
            self._agents[who] = Seen(node=node, heard=now, route=route, has_spoken=spoken)
            if not spoken:
                self._began = self._returned = now
            return
        if spoken and not seen.has_spoken:
            self._returned = now
        seen.node, seen.heard, seen.route = node, now, route
        seen.has_spoken = spoken

    def hear(self, who: Who, route: bytes, now: float) -> bool:
        """Note a message. Returns False if the agent must join (again) before it is answered."""
        seen = self._agents.get(who)
        if seen is None:
            return False
        if not seen.has_spoken:
            self._returned = now
        seen.heard, seen.has_spoken = now, True
        return seen.route == route

    def must_ask(self, who: Who, now: float) -> bool:
        """Return whether to ask the agent who it is, if it was not asked just now."""
        asked = self._asked.get(who)
        if asked is not None and now - asked < ASK_AGAIN_S:
            return False
        self._asked[who] = now
        return True

    def beat(self, who: Who, heartbeat: wire.Heartbeat) -> None:
        """Note where the agent's workers are, and how they get on."""
        if who in self._agents:
            self._agents[who].steps = heartbeat.steps
            self._agents[who].progress = heartbeat.progress

    def release(self, who: Who) -> None:
        """Note that the agent was told to stop: it may fall silent without being missed."""
        if who in self._agents:
            self._agents[who].is_leaving = True

    def drop_route(self, who: Who) -> None:
        """Note that the agent's connection is of no use any more."""
        if who in self._agents:
            self._agents[who].route = None

    def expire(self, now: float) -> list[Who]:
        """Forget the agents whose lease is over, and return those that will be missed.

        As long as others come back to a controller that was restarted, nobody is missed who has yet
        to: they may be many, and take turns.
        """
        pause_s = self._lease_s + _EACH_S * len(self._agents)
        returning = now - self._returned <= pause_s and now - self._began <= RETURN_S
        over = [
            who
            for who, seen in self._agents.items()
            if now - seen.heard > self._lease_s and (seen.has_spoken or not returning)
        ]
        missed = [who for who in over if not self._agents[who].is_leaving]
        for who in over:
            del self._agents[who]
        self._asked = {who: at for who, at in self._asked.items() if now - at < ASK_AGAIN_S}
        return missed

    def extend(self, now: float) -> None:
        """Begin every lease anew: it was this controller that did not listen."""
        for seen in self._agents.values():
            seen.heard = now

    def seen(self, who: Who) -> Seen | None:
        """Return what is known of the agent."""
        return self._agents.get(who)

    def on_node(self, node: str) -> Iterator[Who]:
        """Return the agents on `node` that were not told to stop."""
        return (w for w, seen in self._agents.items() if seen.node == node and not seen.is_leaving)
