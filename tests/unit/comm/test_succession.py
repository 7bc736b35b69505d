from __future__ import annotations

from collections.abc import Iterator

import pytest

from tmover.comm.succession import Succession
from tmover.comm.watch import Loss
from tmover.comm.world import World
from tmover.core.events import Member, Plan
from tmover.errors import Interrupted


def plan(epoch: int, *workers: str) -> Plan:
    members = enumerate(workers)
    return Plan(
        epoch=epoch,
        members=tuple(
            Member(rank=rank, worker=worker, node=worker, endpoint="") for rank, worker in members
        ),
    )


@pytest.fixture
def worlds() -> Iterator[Succession]:
    made = Succession("a", timeout_s=1.0)
    yield made
    for world in [*made.all(), *made.take_remains().worlds]:
        world.latch.close()


def begin(worlds: Succession, what: Plan, *afresh: str) -> World:
    world = worlds.begin(what, afresh)
    assert world is not None
    return world


def enter(worlds: Succession, what: Plan, *afresh: str) -> World:
    world = begin(worlds, what, *afresh)
    worlds.make_ready(world)
    worlds.advance(world)
    return world


def fresh(world: World) -> list[str]:
    return [peer.uid for peer in world.fresh]


def test_survivors_are_reused_by_uid_whatever_their_rank(worlds: Succession) -> None:
    first = enter(worlds, plan(1, "a", "b", "c"))

    second = begin(worlds, plan(2, "c", "d", "a"))

    assert fresh(second) == ["d"]
    assert second.peers[0] is first.peers[2]
    assert second.rank == 2


def test_a_relinked_peer_is_another_one(worlds: Succession) -> None:
    enter(worlds, plan(1, "a", "b", "c"))

    assert fresh(begin(worlds, plan(2, "a", "b", "c"), "a", "b")) == ["b"]


def test_a_lost_peer_is_not_reused(worlds: Succession) -> None:
    first = enter(worlds, plan(1, "a", "b", "c"))
    worlds.lose([Loss(first.peers[1], "cut")])

    assert fresh(begin(worlds, plan(2, "a", "b", "c"))) == ["b"]


def test_a_leaver_that_was_not_released_can_come_back(worlds: Succession) -> None:
    first = enter(worlds, plan(1, "a", "b"))
    enter(worlds, plan(2, "a", "c"))

    third = begin(worlds, plan(3, "a", "b"))

    assert third.peers[1] is first.peers[1]


def test_what_was_released_is_forgotten(worlds: Succession) -> None:
    first = enter(worlds, plan(1, "a", "b"))
    enter(worlds, plan(2, "a", "c"))

    remains = worlds.take_remains()

    assert remains.peers == [first.peers[1]]
    assert remains.worlds == [first]
    assert fresh(begin(worlds, plan(3, "a", "b"))) == ["b"]
    first.latch.close()


def test_who_holds_no_rank_has_no_peers(worlds: Succession) -> None:
    enter(worlds, plan(1, "a", "b"))

    world = begin(worlds, plan(2, "b", "c"))

    assert world.rank is None
    assert world.peers == {}


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_that_is_over_is_never_begun(worlds: Succession, epoch: int) -> None:
    enter(worlds, plan(1, "a", "b"))
    begin(worlds, plan(2, "a", "c"))
    assert worlds.give_up(2) is not None

    with pytest.raises(Interrupted, match=f"epoch {epoch} is over"):
        worlds.begin(plan(epoch, "a", "c"), ())


def test_the_present_epoch_cannot_be_given_up(worlds: Succession) -> None:
    enter(worlds, plan(1, "a", "b"))

    assert worlds.give_up(1) is None
    assert not worlds.is_past(1)
    assert worlds.epoch == 1


def test_a_world_revoked_while_it_is_opened_never_is_ready(worlds: Succession) -> None:
    world = begin(worlds, plan(1, "a", "b"))
    world.revoke("enough")

    with pytest.raises(Interrupted, match="enough"):
        worlds.make_ready(world)
    assert worlds.ready(1) is None


def test_preparing_twice_is_done_once(worlds: Succession) -> None:
    worlds.make_ready(begin(worlds, plan(1, "a", "b")))

    assert worlds.begin(plan(1, "a", "b"), ()) is None


def test_in_a_barrier_only_the_peers_of_its_world_count_and_count_for_both(
    worlds: Succession,
) -> None:
    first = enter(worlds, plan(1, "a", "b", "c"))
    worlds.make_ready(begin(worlds, plan(2, "a", "d", "c")))
    worlds.cross(2)
    leaver, stayer = Loss(first.peers[1], "gone"), Loss(first.peers[2], "gone")

    assert worlds.lose([leaver, stayer]) == {1: [stayer], 2: [stayer]}

    assert worlds.give_up(2) is not None
    assert worlds.lose(worlds.take_deferred()) == {1: [leaver]}


def test_a_joiner_lost_in_a_barrier_is_lost_to_the_coming_world_alone(worlds: Succession) -> None:
    enter(worlds, plan(1, "a", "b"))
    coming = begin(worlds, plan(2, "a", "d"))
    worlds.make_ready(coming)
    joiner = Loss(coming.peers[1], "cut")

    assert worlds.lose([joiner]) == {}
    worlds.cross(2)
    assert worlds.lose(worlds.lost_since(coming)) == {2: [joiner]}


def test_past_the_barrier_what_the_old_world_lost_is_forgotten(worlds: Succession) -> None:
    first = enter(worlds, plan(1, "a", "b", "c"))
    second = begin(worlds, plan(2, "a", "d", "c"))
    worlds.make_ready(second)
    worlds.cross(2)
    worlds.lose([Loss(first.peers[1], "gone")])

    worlds.advance(second)

    assert worlds.take_deferred() == []
    assert worlds.lost_since(second) == []


def test_a_peer_that_said_farewell_is_not_missed(worlds: Succession) -> None:
    world = enter(worlds, plan(1, "a", "b"))
    world.peers[1].left = True

    assert worlds.lose([Loss(world.peers[1], "closed")]) == {}
    assert fresh(begin(worlds, plan(2, "a", "b"))) == ["b"]


def test_an_epoch_before_the_coming_one_is_over(worlds: Succession) -> None:
    enter(worlds, plan(1, "a", "b"))
    coming = begin(worlds, plan(3, "a", "c"))
    worlds.make_ready(coming)

    with pytest.raises(Interrupted, match="epoch 2 is over"):
        worlds.begin(plan(2, "a", "d"), ())
    assert worlds.ready(3) is coming
    assert worlds.is_past(2)
    assert not worlds.is_past(1)


def test_a_leaver_that_is_to_come_back_is_not_let_go(worlds: Succession) -> None:
    first = enter(worlds, plan(1, "a", "b", "c"))
    enter(worlds, plan(2, "a", "d", "c"))
    begin(worlds, plan(3, "a", "b", "c"))

    assert worlds.take_remains().peers == []

    assert worlds.give_up(3) is not None
    assert worlds.take_remains().peers == [first.peers[1]]
