"""The agent's line to a controller, over a connection that loses what it is told to lose."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator

import pytest
import zmq

from support.desk import ScriptedController
from tmover import wire
from tmover.agent.uplink import Uplink
from tmover.config import AgentConfig
from tmover.controller.client import Channel
from tmover.core.events import Finished, FromAgent, Joined
from tmover.environment import AgentEnvironment

JOINED = Joined(job="7", agent="node1-aa", node="node1", address="a", nproc=1, standby=True)
FINISHED = Finished(job="7", worker="node1-aa/0", step=3)
BEAT = wire.Heartbeat(job="7", agent="node1-aa")
CONFIG = AgentConfig(heartbeat_s=0.02)


class Lossy(Channel):
    """A channel that cannot send the next message of a kind, as if it were not connected yet."""

    loses: type[FromAgent] | None = None

    def send(self, message: wire.ToController) -> bool:
        if self.loses is not None and isinstance(message, self.loses) and self.is_open():
            type(self).loses = None
            return False
        return super().send(message)

    def is_open(self) -> bool:
        """Whether the heartbeat that follows at once would get through."""
        return bool(self.socket.poll(0, zmq.POLLOUT))


@pytest.fixture
def controller(tmp_path: pathlib.Path) -> Iterator[ScriptedController]:
    with ScriptedController(tmp_path) as made:
        yield made


@pytest.fixture
def uplink(tmp_path: pathlib.Path, controller: ScriptedController) -> Iterator[Uplink]:
    del controller  # its keys are there before anybody connects
    place = AgentEnvironment(
        state=tmp_path, job="7", node="node1", address="a", standby=True, slot=None
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Uplink(place, JOINED, CONFIG, context, connect=Lossy)
    yield made
    Lossy.loses = None
    made.close()
    context.term()


def hear(uplink: Uplink, controller: ScriptedController, kind: type[FromAgent]) -> FromAgent:
    """Tick until the controller has heard an event of a kind."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        uplink.tick(time.monotonic(), BEAT)
        list(uplink.receive(time.monotonic()))
        heard = controller.take(kind, wait_s=0.005)
        if heard is not None:
            return heard
    raise AssertionError(f"no {kind.__name__} was heard")  # noqa: EM102


def test_an_agent_that_could_not_join_at_once_joins_though_heartbeats_are_answered(
    uplink: Uplink, controller: ScriptedController
) -> None:
    Lossy.loses = Joined

    assert hear(uplink, controller, Joined) == JOINED
    assert Lossy.loses is None


def test_an_event_that_could_not_be_sent_is_said_again(
    uplink: Uplink, controller: ScriptedController
) -> None:
    hear(uplink, controller, Joined)
    Lossy.loses = Finished

    uplink.tell(FINISHED)

    assert Lossy.loses is None
    assert hear(uplink, controller, Finished) == FINISHED
