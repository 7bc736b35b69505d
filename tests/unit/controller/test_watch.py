"""What the state of nodes means for jobs."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from support.schedulers import ScriptedScheduler
from tmover.controller.presence import Presence, Who
from tmover.controller.watch import Watch
from tmover.core.events import AnyEvent, MoveRequested, NodeLost, NodeReady
from tmover.errors import SchedulerError
from tmover.scheduler.interface import NodeInfo, NodeState

ANN, BOB = Who("1", "node1-aa"), Who("2", "node1-bb")


def info(name: str, state: NodeState, reason: str = "") -> NodeInfo:
    return NodeInfo(name=name, address="", state=state, reason=reason)


def watch(*agents: Who, posted: list[AnyEvent] | None = None) -> tuple[Watch, ScriptedScheduler]:
    presence = Presence(lease_s=5)
    for agent in agents:
        presence.join(agent, "node1", b"r", now=0)
    scheduler = ScriptedScheduler()
    post = ([] if posted is None else posted).append
    return Watch(scheduler, poll_s=0.001, agents_on=presence.on_node, post=post), scheduler


def test_a_draining_node_is_to_be_left() -> None:
    watcher, _ = watch(ANN)

    events = watcher.events([info("node1", NodeState.DRAINING, "bad memory")])

    assert events == [MoveRequested(job="1", node="node1", reason="bad memory")]


def test_a_node_that_is_down_is_lost() -> None:
    watcher, _ = watch(ANN)

    events = watcher.events([info("node1", NodeState.DOWN)])

    assert events == [NodeLost(job="1", node="node1", reason="the scheduler says it is down")]


def test_a_failing_node_is_left_and_not_taken_for_dead() -> None:
    watcher, _ = watch(ANN)

    events = watcher.events([info("node1", NodeState.FAILING, "slurmd does not answer")])

    assert events == [MoveRequested(job="1", node="node1", reason="slurmd does not answer")]


@pytest.mark.parametrize(
    "state", set(NodeState) - {NodeState.DRAINING, NodeState.FAILING, NodeState.DOWN}
)
def test_other_states_are_no_news(state: NodeState) -> None:
    watcher, _ = watch(ANN)

    assert watcher.events([info("node1", state)]) == []


def test_a_node_without_an_agent_of_ours_is_no_news() -> None:
    watcher, _ = watch(ANN)

    assert watcher.events([info("node2", NodeState.DOWN)]) == []


def test_news_is_told_once_per_spell() -> None:
    watcher, _ = watch(ANN)
    draining = info("node1", NodeState.DRAINING)

    assert len(watcher.events([draining])) == 1
    assert watcher.events([draining]) == []
    assert len(watcher.events([info("node1", NodeState.DOWN)])) == 1
    assert watcher.events([info("node1", NodeState.ALLOCATED)]) == [
        NodeReady(job="1", node="node1")
    ]
    assert len(watcher.events([draining])) == 1


def test_every_job_on_the_node_is_told() -> None:
    watcher, _ = watch(ANN, BOB)

    events = watcher.events([info("node1", NodeState.DOWN)])

    assert [event.job for event in events] == ["1", "2"]


def test_a_job_with_two_agents_on_the_node_is_told_once() -> None:
    watcher, _ = watch(ANN, Who("1", "node1-cc"))

    assert len(watcher.events([info("node1", NodeState.DOWN)])) == 1


def test_a_scheduler_that_does_not_answer_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    posted: list[AnyEvent] = []
    watcher, scheduler = watch(ANN, posted=posted)
    down = [info("node1", NodeState.DOWN)]
    scheduler.answers = [SchedulerError("away"), SchedulerError("away"), OSError("gone"), down]
    caplog.set_level("INFO")

    async def until_told() -> None:
        task = asyncio.ensure_future(watcher.run())
        while not posted:
            await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(until_told())

    texts = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert texts == ["the scheduler did not answer: away", "the scheduler answers again"]


def test_a_node_that_was_drained_and_is_resumed_may_stay() -> None:
    watcher, _ = watch(ANN, BOB)
    watcher.events([info("node1", NodeState.DRAINING), info("node2", NodeState.IDLE)])
    assert watcher.events([]) == []

    resumed = [info("node1", NodeState.ALLOCATED)]

    assert watcher.events(resumed) == [
        NodeReady(job="1", node="node1"),
        NodeReady(job="2", node="node1"),
    ]
    assert watcher.events(resumed) == []


def test_a_node_that_is_down_and_back_was_lost() -> None:
    watcher, _ = watch(ANN)
    watcher.events([info("node1", NodeState.DOWN)])

    assert watcher.events([info("node1", NodeState.IDLE)]) == []
