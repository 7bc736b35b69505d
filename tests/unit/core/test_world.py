"""Whole runs of simulated ranks under the real `decide`, in every order that hypothesis finds."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from support.chaos import Chaos
from support.world import World
from tmover.core.phase import Ended

DEATHS = ("node", "workers")
CHAOS = (
    *DEATHS, "down", "request", "cut", "refuse", "restart", "again", "order again", "ask",
    "script", "expire", "early",
)  # fmt: skip
HARMLESS = tuple(kind for kind in CHAOS if kind not in ("script", "expire", "early"))
"""What must not keep a job from its end, given nodes enough."""

tapes = st.binary(max_size=500)
pytestmark = pytest.mark.timeout(600)  # many runs each: a busy machine takes long


def disturbances(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Chaos]]:
    one = st.builds(
        Chaos, tick=st.integers(1, 170), kind=st.sampled_from(kinds), who=st.integers(0, 7)
    )
    return st.lists(one, max_size=4)


def ended(world: World) -> Ended:
    assert isinstance(world.job.phase, Ended), world.job.phase
    return world.job.phase


def test_an_undisturbed_run_ends_where_it_must() -> None:
    world = World().run()

    world.check()
    assert ended(world) == Ended(code=0, reason="done")
    assert world.job.epoch == 1


@given(
    tape=tapes,
    chaos=disturbances(CHAOS),
    nnodes=st.integers(1, 4),
    standbys=st.integers(0, 2),
    total=st.sampled_from((1, 4)),
)
def test_every_run_ends_in_a_declared_outcome_with_every_step_applied_once(
    tape: bytes, chaos: list[Chaos], nnodes: int, standbys: int, total: int
) -> None:
    world = World(nnodes=nnodes, standbys=standbys, spares=1, total=total, tape=tape, chaos=chaos)

    world.run().check()


@given(tape=tapes, chaos=disturbances(HARMLESS), moves=st.booleans(), nproc=st.integers(1, 2))
def test_with_nodes_enough_every_run_comes_to_its_end(
    tape: bytes, chaos: list[Chaos], moves: bool, nproc: int
) -> None:
    if moves:
        chaos = [*chaos, Chaos(tick=45, kind="request", who=1)]
    world = World(standbys=2, spares=9, nproc=nproc, tape=tape, chaos=chaos)

    world.run().check()

    reason = ended(world).reason
    assert reason == "done" or reason.startswith("no workers came up in time")


@pytest.mark.parametrize("kind", DEATHS)
@pytest.mark.parametrize("who", [0, 1, 2, 3], ids=["rank 0", "leaver", "stayer", "joiner"])
def test_a_death_at_any_point_of_a_planned_move_costs_no_step(who: int, kind: str) -> None:
    for tick in range(50, 150, 5):
        chaos = [Chaos(tick=48, kind="request", who=1), Chaos(tick=tick, kind=kind, who=who)]
        world = World(standbys=2, total=9, chaos=chaos)

        world.run().check()

        assert ended(world).reason == "done", chaos
        # a joiner's node that dies while parked is missed by its lease only: training may end first
        is_noticed = (who, kind) != (3, "node")
        assert not is_noticed or world.job.slots[1] != "a1", f"the move was not made: {chaos}"


@pytest.mark.parametrize("who", [0, 1, 2, 3], ids=["rank 0", "leaver", "stayer", "joiner"])
def test_a_link_that_breaks_at_any_point_of_a_planned_move_leaves_none_that_one_end_has(
    who: int,
) -> None:
    """Some have passed by then, and some have not."""
    for tick in range(80, 110):
        chaos = [Chaos(tick=48, kind="request", who=1), Chaos(tick=tick, kind="cut", who=who)]
        world = World(standbys=2, total=9, chaos=chaos)

        world.run().check()

        assert ended(world).reason == "done", chaos


def test_a_link_that_was_to_be_opened_afresh_is_so_in_the_world_after_the_next() -> None:
    for tick in range(66, 90):
        chaos = [Chaos(tick=66, kind="cut", who=1), Chaos(tick=tick, kind="cut", who=0)]

        World(standbys=2, spares=9, chaos=chaos).run().check()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1, 2, 3])
def test_a_second_death_at_any_point_of_a_recovery_is_a_death_like_any_other(
    first: int, second: int
) -> None:
    for tick in range(60, 150, 5):
        chaos = [
            Chaos(tick=60, kind="node", who=first),
            Chaos(tick=tick, kind="node", who=second),
        ]
        world = World(nnodes=3, standbys=2, spares=1, chaos=chaos)

        world.run().check()

        assert ended(world).reason == "done", chaos


@pytest.mark.parametrize("kind", ["request", "node", "cut"])
def test_a_controller_may_die_at_any_point(kind: str) -> None:
    for tick in range(1, 150, 5):
        chaos = [Chaos(tick=55, kind=kind, who=1), Chaos(tick=tick, kind="restart")]
        world = World(standbys=1, chaos=chaos)

        world.run().check()

        assert ended(world).reason == "done", chaos


@pytest.mark.parametrize("who", [0, 1, 2, 3], ids=["rank 0", "leaver", "stayer", "joiner"])
def test_a_controller_may_die_at_any_point_of_a_move_that_fails(who: int) -> None:
    for tick in range(60, 140, 5):
        chaos = [
            Chaos(tick=48, kind="request", who=1),
            Chaos(tick=82, kind="workers", who=who),
            Chaos(tick=tick, kind="restart"),
        ]
        world = World(standbys=2, total=6, chaos=chaos)

        world.run().check()

        assert ended(world).reason == "done", chaos


@pytest.mark.parametrize("who", [0, 1, 2], ids=["of who is asked", "of a neighbour", "of a third"])
@pytest.mark.parametrize("kind", [*DEATHS, "cut", "refuse"])
def test_a_checkpoint_is_taken_after_the_same_step_by_all_whoever_dies_meanwhile(
    kind: str, who: int
) -> None:
    for tick in range(71, 161, 3):
        chaos = [Chaos(tick=70, kind="ask", who=0), Chaos(tick=tick, kind=kind, who=who)]
        world = World(standbys=2, spares=2, total=9, chaos=chaos)

        world.run().check()

        assert ended(world).reason == "done", chaos
        assert world.asked
        world.check_saved()


def test_a_checkpoint_asked_for_at_any_point_of_a_planned_move_is_taken_by_all() -> None:
    for who in range(4):
        for tick in range(48, 150, 3):
            chaos = [Chaos(tick=48, kind="request", who=1), Chaos(tick=tick, kind="ask", who=who)]
            world = World(standbys=1, total=9, chaos=chaos)

            world.run().check()

            assert ended(world).reason == "done", chaos
            world.check_saved()
            stays = any(endpoint in world.finished for endpoint, _ in world.asked)
            assert world.count_saved() == 1 or not stays, chaos  # a leaver may take it along


def test_several_requests_before_a_checkpoint_is_taken_are_one() -> None:
    chaos = [Chaos(tick=70, kind="ask", who=who) for who in (0, 0, 1, 2)]

    world = World(total=9, chaos=chaos).run()

    world.check_saved()
    assert len(world.asked) == 4
    assert world.count_saved() == 1


def test_a_keeper_that_joined_just_now_may_be_missed_at_any_point() -> None:
    """Slot 0's records are kept on slot 1: they are lost if both go before the joiner has them."""
    for tick in range(62, 120, 2):
        chaos = [Chaos(tick=60, kind="node", who=1), Chaos(tick=tick, kind="node", who=0)]
        world = World(standbys=2, chaos=chaos)

        world.run().check()

        assert ended(world).reason == "done", chaos


@pytest.mark.full
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tape=st.binary(max_size=1500),
    chaos=st.lists(
        st.builds(
            Chaos, tick=st.integers(1, 300), kind=st.sampled_from(CHAOS), who=st.integers(0, 9)
        ),
        max_size=8,
    ),
    nnodes=st.integers(1, 5),
    nproc=st.integers(1, 2),
    standbys=st.integers(0, 3),
    total=st.integers(1, 7),
)
def test_long_runs(
    tape: bytes, chaos: list[Chaos], nnodes: int, nproc: int, standbys: int, total: int
) -> None:
    world = World(
        nnodes=nnodes, nproc=nproc, standbys=standbys, spares=2, total=total, tape=tape, chaos=chaos
    )

    world.run().check()
