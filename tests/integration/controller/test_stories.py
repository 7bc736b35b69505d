"""Whole stories with scripted agents, and with the controller's death at each of their points."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.scripted import (
    Cast,
)
from tmover import wire
from tmover.controller.client import ask
from tmover.core.orders import Assign, Prepare, Revoke

Kill = Callable[..., None]
"""Called at each named point of a story, with what happens at that point."""


def nothing() -> None:
    """What happens at a point where nothing does."""


class Undisturbed:
    """Lets a story go its way."""

    def __call__(self, point: str, happens: Callable[[], None] = nothing) -> None:
        happens()


class KilledAt:
    """Kills the controller at points of a story (all, if none is named), and starts it again.

    What happens at such a point happens while no controller hears it.
    """

    def __init__(self, cast: Cast, *points: str) -> None:
        self._cast = cast
        self._points = points
        self.seen: list[str] = []

    def __call__(self, point: str, happens: Callable[[], None] = nothing) -> None:
        self.seen.append(point)
        if not self._points or point in self._points:
            self._cast.restart(happens)
        else:
            happens()


# --- the stories ----------------------------------------------------------------------------------


def planned_move(cast: Cast, at: Kill) -> dict[str, object]:
    """Rank 0's node is left, and the job goes on to its end."""
    job = cast.submit(2)
    at("submitted")
    first = cast.join(job, "node1", slot=0)
    cast.until(lambda: first.launch == 1, "the first agent's welcome")
    at("half the agents are there")
    second = cast.join(job, "node2", slot=1)
    cast.until(lambda: cast.status(job).phase == "training", "training")
    at("training")
    joiner = cast.join(job, "node3", standby=True)
    cast.until(lambda: cast.warm(job) == 1, "a warm standby")
    at("a standby is warm")

    second.hold(Prepare)
    ask(cast.state, wire.MoveRequest(node="node1", reason="maintenance"))
    cast.until(lambda: bool(first.prepared and joiner.prepared), "most to be prepared")
    at("the last rank prepares", second.let_go)
    cast.until(lambda: bool(first.armed and second.armed and joiner.armed), "all to be armed")
    plan = joiner.armed
    assert plan is not None

    at("the first rank switches", lambda: second.enter(plan, 7, is_joiner=False))
    cast.until(lambda: cast.status(job).phase == "switching", "switching")
    cast.barrier_is_shut = True
    first.enter(plan, 7, is_joiner=False)
    at("the state is handed over", lambda: joiner.enter(plan, 7, is_joiner=True))
    at("one rank has passed", second.pass_barrier)
    joiner.pass_barrier()
    cast.until(lambda: first.stopped is not None, "the leaver to be released")
    at("the move is done")
    nodes = cast.nodes(job)

    at("one rank has finished", second.finish)
    joiner.finish()
    return ending(cast, job) | {"nodes": nodes, "epochs": (joiner.rank.epoch, second.rank.epoch)}


def failure(cast: Cast, at: Kill) -> dict[str, object]:
    """Rank 0's node dies without a word, in doubt about a step, and the job goes on to its end."""
    job, (first, second, third, joiner) = cast.form(3, standbys=1)
    for agent in (second, third):
        agent.rank.step = 4
    third.rank.step, third.rank.doubt = 3, 4
    at("training")
    first.die()

    third.hold(Revoke)
    joiner.hold(Assign)
    at("the first link is seen to break", lambda: second.lose_link(first.name))
    cast.until(lambda: cast.status(job).phase == "revoked", "the epoch to be revoked")
    at("the second link is seen to break", lambda: third.lose_link(first.name))
    cast.until(lambda: second.last(Revoke) is not None, "the revocation")
    at("the last survivor reports", third.let_go)
    cast.until(lambda: bool(joiner.held.get(Assign)), "the assignment")
    at("the joiner gets its orders", joiner.let_go)
    cast.until(lambda: cast.status(job).phase == "training", "training")
    at("the failure is over")
    assigned = [agent.last(Assign) for agent in (second, third, joiner)]
    nodes = cast.nodes(job)

    for agent in (second, third, joiner):
        agent.finish()
    steps = {order.step for order in assigned if order is not None}
    epochs = tuple(agent.rank.epoch for agent in (second, third, joiner))
    return ending(cast, job) | {"nodes": nodes, "steps": steps, "epochs": epochs}


def ending(cast: Cast, job: str) -> dict[str, object]:
    living = [agent for agent in cast.agents if not agent.is_dead]
    cast.until(lambda: all(agent.stopped is not None for agent in living), "everybody to stop")
    status = cast.status(job)
    return {
        "phase": status.phase,
        "code": status.code,
        "outcome": status.outcome,
        "told": [(a.stopped.code, a.stopped.reason) for a in living if a.stopped is not None],
        "secrets": len({agent.secret for agent in living}),
    }


MOVED = {
    "phase": "ended",
    "code": 0,
    "outcome": "done",
    "told": [(0, "released"), (0, "done"), (0, "done")],
    "secrets": 1,
    "nodes": ["node3", "node2"],
    "epochs": (2, 2),
}
RECOVERED = {
    "phase": "ended",
    "code": 0,
    "outcome": "done",
    "told": [(0, "done")] * 3,
    "secrets": 1,
    "nodes": ["node4", "node2", "node3"],
    "steps": {4},
    "epochs": (2, 2, 2),
}


def test_a_planned_move(cast: Cast) -> None:
    assert planned_move(cast, Undisturbed()) == MOVED


def test_a_planned_move_survives_the_controllers_death_at_every_point(own: Cast) -> None:
    assert planned_move(own, KilledAt(own)) == MOVED


def test_a_failure(cast: Cast) -> None:
    assert failure(cast, Undisturbed()) == RECOVERED


def test_a_failure_survives_the_controllers_death_at_every_point(own: Cast) -> None:
    assert failure(own, KilledAt(own)) == RECOVERED


@pytest.mark.full
@pytest.mark.parametrize(
    "point",
    [
        "submitted", "half the agents are there", "training", "a standby is warm",
        "the last rank prepares", "the first rank switches", "the state is handed over",
        "one rank has passed", "the move is done", "one rank has finished",
    ],
)  # fmt: skip
def test_a_planned_move_survives_the_controllers_death(own: Cast, point: str) -> None:
    killed = KilledAt(own, point)

    assert planned_move(own, killed) == MOVED
    assert point in killed.seen


@pytest.mark.full
@pytest.mark.parametrize(
    "point",
    [
        "training", "the first link is seen to break", "the second link is seen to break",
        "the last survivor reports", "the joiner gets its orders", "the failure is over",
    ],
)  # fmt: skip
def test_a_failure_survives_the_controllers_death(own: Cast, point: str) -> None:
    killed = KilledAt(own, point)

    assert failure(own, killed) == RECOVERED
    assert point in killed.seen
