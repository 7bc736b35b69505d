"""Jobs in which no rank can stand in for another: all return to the newest copies there are."""

from __future__ import annotations

import itertools

import pytest

from support.jobs import (
    Story,
    entered,
    exited,
    joined,
    passed,
    prepared,
    reported,
    requested,
    verified,
    warm,
)
from tmover.core import copies as placement
from tmover.core.events import Finished, Reported, Sharing
from tmover.core.orders import Action, Assign
from tmover.core.phase import Forming, Recovering, Waiting

Kept = dict[int, tuple[int, ...]]


def without_replicas(story: Story, *, copies: int = 1) -> Story:
    """Say what the first vote has shown: nobody has a replica."""
    story.training()
    story.hear(Sharing(job="j", worker="a0/0", launch=1, keepers=(), copies=copies))
    return story


def stands(
    worker: str, step: int, own: tuple[int, ...], kept: Kept, *, of: int = 1, epoch: int = 0
) -> Reported:
    """Return the word of a worker that stands at `step` and holds copies of its own and others."""
    where = epoch or of
    return Reported(
        job="j", worker=worker, of=of, epoch=where, step=step, doubt=None, own=own, kept=kept
    )


def assigned(actions: list[Action]) -> dict[str, Assign]:
    return {action.agent: action for action in actions if isinstance(action, Assign)}


def test_all_return_to_the_newest_copy_there_is_of_every_rank() -> None:
    story = without_replicas(Story())
    story.tell(exited("a1"))

    actions = story.tell(
        stands("a0/0", 7, (6, 7), {2: (6, 7)}),
        stands("a2/0", 7, (6, 7), {1: (6,)}),
    )

    orders = assigned(actions)
    assert set(orders) == {"a0", "s0", "a2"}
    assert all(order.back and order.step == 6 for order in orders.values())
    assert orders["a0"].sources == {"s0/0": "a2/0"}
    assert isinstance(story.job.phase, Recovering)


def test_who_holds_no_copy_of_its_own_gets_it_from_its_keeper_too() -> None:
    """A joiner has none until it has trained on for a step."""
    story = without_replicas(Story())
    story.tell(exited("a1"))

    actions = story.tell(
        stands("a0/0", 7, (6, 7), {2: (6, 7)}),
        stands("a2/0", 7, (7,), {1: (6,)}),
    )

    assert assigned(actions)["a0"].sources == {"s0/0": "a2/0", "a2/0": "a0/0"}


def test_a_step_that_was_committed_is_taken_back_with_the_others() -> None:
    """Also where a rank is in doubt about the next one: it passed nowhere that counts."""
    story = without_replicas(Story())
    story.tell(exited("a1"))
    doubtful = Reported(
        job="j", worker="a0/0", of=1, epoch=1, step=6, doubt=7, own=(5, 6), kept={2: (5, 6)}
    )

    actions = story.tell(doubtful, stands("a2/0", 7, (5, 6, 7), {1: (5,)}))

    assert {order.step for order in assigned(actions).values()} == {5}


def test_copies_that_went_with_two_nodes_start_all_afresh() -> None:
    story = without_replicas(Story(standbys=2))
    story.tell(exited("a1"), exited("a2"))

    story.tell(stands("a0/0", 7, (6, 7), {2: (6, 7)}))

    assert isinstance(story.job.phase, Forming)
    assert not story.job.copies
    assert story.job.keepers == ()


def test_who_has_ended_the_script_is_not_sent_back_into_it() -> None:
    """Two losses after the last step, before the second keeper has it: nobody can do it again."""
    story = without_replicas(Story())
    story.tell(Finished(job="j", worker="a0/0", step=7))
    story.tell(exited("a1"))

    story.tell(
        stands("a0/0", 7, (6, 7), {2: (6, 7)}),
        stands("a2/0", 7, (6, 7), {1: (6,)}),
    )

    assert isinstance(story.job.phase, Forming)


def test_who_has_ended_the_script_waits_where_it_stands_for_a_joiner() -> None:
    story = without_replicas(Story())
    story.tell(Finished(job="j", worker="a0/0", step=7))
    story.tell(exited("a1"))

    actions = story.tell(
        stands("a0/0", 7, (6, 7), {2: (6, 7)}),
        stands("a2/0", 7, (6, 7), {1: (6, 7)}),
    )

    assert {order.step for order in assigned(actions).values()} == {7}


def test_two_nodes_that_do_not_keep_for_each_other_are_replaced() -> None:
    story = without_replicas(Story(nnodes=4, standbys=2))
    story.tell(exited("a1"), exited("a3"))

    actions = story.tell(
        stands("a0/0", 7, (6, 7), {3: (6, 7)}), stands("a2/0", 7, (6, 7), {1: (6, 7)})
    )

    orders = assigned(actions)
    assert orders["a0"].step == 7
    assert orders["a0"].sources == {"s0/0": "a2/0", "s1/0": "a0/0"}


def test_a_second_loss_in_a_recovery_returns_to_what_is_left_then() -> None:
    """The joiner holds the copy it has received, and its keeper still keeps it."""
    story = without_replicas(Story(nnodes=4, standbys=2))
    story.tell(exited("a1"))
    others: dict[str, Kept] = {"a0/0": {3: (6, 7)}, "a2/0": {1: (6,)}, "a3/0": {2: (6, 7)}}
    story.tell(*(stands(worker, 7, (6, 7), kept) for worker, kept in others.items()))
    assert isinstance(story.job.phase, Recovering)

    story.tell(exited("a3"))
    actions = story.tell(
        stands("a0/0", 6, (6,), {3: (6,)}, of=2),
        stands("a2/0", 6, (6,), {1: (6,)}, of=2),
        reported("s0/0", None, of=2, epoch=0),
    )

    orders = assigned(actions)
    assert {order.step for order in orders.values()} == {6}
    assert orders["a0"].sources == {"s0/0": "a2/0", "s1/0": "a0/0"}


def test_without_a_standby_the_copies_wait() -> None:
    story = without_replicas(Story(standbys=0))
    story.tell(exited("a1"))
    story.tell(
        stands("a0/0", 7, (6, 7), {2: (6, 7)}),
        stands("a2/0", 7, (6, 7), {1: (6, 7)}),
    )
    assert isinstance(story.job.phase, Waiting)

    story.tell(joined("s0"))
    actions = story.warmed("s0")

    assert {order.step for order in assigned(actions).values()} == {7}
    assert warm("s0/0").schema == story.job.schemas[1]


def test_a_leaver_that_is_not_released_yet_sends_the_only_copy_it_keeps() -> None:
    """Who has taken its place keeps nothing yet, and the rank it kept for is lost."""
    story = without_replicas(Story(standbys=2))
    story.tell(requested("n1"), *(prepared(w, 2) for w in ("a0/0", "a1/0", "a2/0", "s0/0")))
    story.tell(*(entered(worker, 2, 3) for worker in ("a0/0", "a1/0", "a2/0")))
    story.tell(verified("s0/0", 2, 3), passed("a2/0", 2, 3), passed("s0/0", 2, 3))
    story.tell(exited("a0"))

    actions = story.tell(
        stands("a2/0", 3, (2, 3), {1: (2, 3)}, of=1, epoch=2),
        stands("a2/0", 3, (2, 3), {1: (2, 3)}, of=2),
        stands("a1/0", 3, (2,), {0: (2,)}, of=1, epoch=1),
        stands("a1/0", 3, (2,), {0: (2,)}, of=2, epoch=1),
        stands("s0/0", 3, (3,), {}, of=2),
    )

    orders = assigned(actions)
    assert set(orders) == {"s1", "s0", "a2", "a1"}
    assert {order.step for order in orders.values()} == {2}
    assert orders["s0"].sources == {"s1/0": "a1/0", "s0/0": "a2/0"}


SIZES = [(nnodes, nproc) for nnodes in (2, 3, 5) for nproc in (1, 2)]


def held_of(rank: int, step: int, *, nodes: int, nproc: int, world_size: int) -> Reported:
    """Return the word of a rank that holds what it is to hold of one generation."""
    wards = placement.wards(rank, nodes=nodes, nproc=nproc, world_size=world_size)
    kept: Kept = dict.fromkeys(wards, (step,))
    return stands(f"a{rank // nproc}/{rank % nproc}", step, (step,), kept)


@pytest.mark.parametrize(("nnodes", "nproc"), SIZES)
def test_a_rank_is_kept_by_others_in_its_place_on_as_many_other_nodes(
    nnodes: int, nproc: int
) -> None:
    size = nnodes * nproc
    for rank, nodes in itertools.product(range(size), range(1, nnodes)):
        keepers = placement.keepers(rank, nodes=nodes, nproc=nproc, world_size=size)
        assert {keeper % nproc for keeper in keepers} == {rank % nproc}
        assert len({keeper // nproc for keeper in keepers} - {rank // nproc}) == nodes
        for keeper in keepers:
            assert rank in placement.wards(keeper, nodes=nodes, nproc=nproc, world_size=size)


@pytest.mark.parametrize(("nnodes", "nproc"), SIZES)
def test_whichever_nodes_are_lost_a_copy_of_every_rank_is_left(nnodes: int, nproc: int) -> None:
    """As many as there are keepers may be lost. One more, and those side by side take one along."""
    size = nnodes * nproc
    for nodes in range(1, nnodes):
        said = [held_of(rank, 7, nodes=nodes, nproc=nproc, world_size=size) for rank in range(size)]
        for lost in itertools.combinations(range(nnodes), nodes):
            assert _newest_without(lost, said, nproc) == 7
        assert _newest_without(tuple(range(nodes + 1)), said, nproc) is None


def _newest_without(lost: tuple[int, ...], said: list[Reported], nproc: int) -> int | None:
    left = {rank: word for rank, word in enumerate(said) if rank // nproc not in lost}
    held = [placement.held_of(rank, left.get(rank), left.values()) for rank in range(len(said))]
    return placement.newest(held)


def test_two_nodes_side_by_side_are_replaced_where_two_others_keep_each_rank() -> None:
    story = without_replicas(Story(nnodes=4, standbys=2), copies=2)
    story.tell(exited("a1"), exited("a2"))

    actions = story.tell(
        stands("a0/0", 7, (6, 7), {3: (6, 7), 2: (6,)}),
        stands("a3/0", 7, (6, 7), {2: (6, 7), 1: (6,)}),
    )

    orders = assigned(actions)
    assert {order.step for order in orders.values()} == {6}
    assert orders["a0"].sources == {"s0/0": "a3/0", "s1/0": "a0/0"}


def test_three_nodes_side_by_side_take_a_rank_along_that_two_others_kept() -> None:
    story = without_replicas(Story(nnodes=4, standbys=3), copies=2)
    story.tell(exited("a1"), exited("a2"), exited("a3"))

    story.tell(stands("a0/0", 7, (6, 7), {3: (6, 7), 2: (6, 7)}))

    assert isinstance(story.job.phase, Forming)
    assert not story.job.copies
