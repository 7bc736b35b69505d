"""The controller dies at every point of every story; what comes of the story is the same."""

from __future__ import annotations

import logging
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import pytest

from support.chaos import Chaos, disturb
from support.mortal import Doom
from support.shellworld import ShellWorld, Story
from tmover import wire
from tmover.core.orders import Prepare
from tmover.core.phase import Preparing, Stage, Switching

Scene = Iterator[Callable[[], bool]]
QUIET = 10_000
"""So many things do not happen before all stands still."""


def until_the_end(world: ShellWorld) -> Scene:
    yield lambda: world.is_training(warm=1)


def planned_move(world: ShellWorld) -> Scene:
    yield lambda: world.is_training(warm=1)
    world.ask(wire.MoveRequest(job=world.name, node="node1", reason="to be serviced"))
    yield lambda: world.is_training(warm=1) and "node1" not in world.nodes()


def maintenance(world: ShellWorld) -> Scene:
    yield lambda: world.is_training(warm=1)
    world.slurm.drain("node1")
    yield lambda: world.is_training(warm=1) and "node1" not in world.nodes()


def failure(world: ShellWorld) -> Scene:
    yield lambda: world.is_training(warm=1)
    world.kill(world.agent_on(0))
    yield lambda: world.is_training(warm=1) and "node1" not in world.nodes()


def failure_without_a_standby(world: ShellWorld) -> Scene:
    yield world.is_training
    world.kill(world.agent_on(0))
    yield lambda: world.is_training() and "node1" not in world.nodes()


def two_failures(world: ShellWorld) -> Scene:
    """The second node dies while the first is being replaced."""
    yield lambda: world.is_training(warm=2)
    world.kill(world.agent_on(0))
    yield lambda: world.is_in(Stage.SWITCHING)
    world.kill(world.agent_on(1))
    yield lambda: world.is_training(warm=2) and not {"node1", "node2"} & {*world.nodes()}


def death_of_a_standby(world: ShellWorld) -> Scene:
    yield lambda: world.is_training(warm=1)
    first = world.standby()
    world.kill(first)
    yield lambda: world.is_training(warm=1) and world.standby() is not first


def abort(world: ShellWorld) -> Scene:
    """The joiner dies before the barrier: the leaver trains on, and is left with the next one."""
    yield lambda: world.is_training(warm=1)
    world.ask(wire.MoveRequest(job=world.name, node="node1", reason="to be serviced"))
    yield lambda: isinstance(world.job.phase, Preparing)
    world.kill(world.standby())
    yield lambda: world.is_training(warm=1) and "node1" not in world.nodes()


def leaver_lost(world: ShellWorld) -> Scene:
    """The leaver dies while it hands over."""
    yield lambda: world.is_training(warm=1)
    world.ask(wire.MoveRequest(job=world.name, node="node1", reason="to be serviced"))
    yield lambda: isinstance(world.job.phase, Switching)
    world.kill(world.agent_on(0))
    yield lambda: world.is_training(warm=1) and "node1" not in world.nodes()


def too_slow_to_prepare(world: ShellWorld) -> Scene:
    """A rank does not prepare: its deadline passes, and the move is made at the next attempt."""
    yield lambda: world.is_training(warm=1)
    deaf = (world.agent_on(1).name, Prepare)
    world.deaf.add(deaf)
    world.ask(wire.MoveRequest(job=world.name, node="node1", reason="to be serviced"))
    yield lambda: any(request.attempts for request in world.job.requests.values())
    world.deaf.remove(deaf)
    yield lambda: world.is_training(warm=1) and "node1" not in world.nodes()


def broken_link(world: ShellWorld) -> Scene:
    """Both ends live on: the link is opened anew."""
    yield lambda: world.is_training(warm=1)
    disturb(world, Chaos(tick=0, kind="cut", who=0))
    yield lambda: world.is_training(warm=1) and world.job.in_force > 1


def cancelled(world: ShellWorld) -> Scene:
    yield lambda: world.is_training(warm=1)
    world.ask(wire.CancelRequest(job=world.name, reason="enough"))
    yield lambda: world.is_in(Stage.ENDED)


STORIES: dict[Story, int] = {
    until_the_end: 1,
    planned_move: 1,
    maintenance: 1,
    failure: 1,
    failure_without_a_standby: 0,
    two_failures: 2,
    death_of_a_standby: 1,
    abort: 1,
    leaver_lost: 1,
    too_slow_to_prepare: 1,
    broken_link: 1,
    cancelled: 1,
}
"""How many standbys the job of each keeps."""


def play(story: Story, doom: Doom | None = None, *, outage: int = 0) -> ShellWorld:
    with tempfile.TemporaryDirectory(dir=_memory()) as directory:
        world = ShellWorld(
            pathlib.Path(directory), story, standbys=STORIES[story], doom=doom, outage=outage
        )
        world.run().check()
    return world


def _memory() -> pathlib.Path | None:
    """Return where files cost nothing, if there is such a place."""
    memory = pathlib.Path("/dev/shm")  # noqa: S108 - a directory of our own is made there
    return memory if memory.is_dir() else None


def story_name(story: object) -> str:
    return getattr(story, "__name__", str(story)).replace("_", " ")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of runs have much to say."""
    caplog.set_level(logging.CRITICAL, "tmover")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("outage", [0, QUIET], ids=["for a moment", "until all stands still"])
@pytest.mark.parametrize("story", STORIES, ids=story_name)
def test_the_story_ends_the_same_wherever_the_controller_dies(story: Story, outage: int) -> None:
    undisturbed = play(story)
    expected = undisturbed.outcome()

    for at, point in enumerate(undisturbed.doom.points):
        world = play(story, Doom(at), outage=outage)

        assert world.doom.has_struck
        assert world.outcome() == expected, (at, point)
