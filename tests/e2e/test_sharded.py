"""Models of which no rank holds all: moved and recovered like any other, with the same bits."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Outcome, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

SCRIPT = pathlib.Path(__file__).parent / "train_sharded.py"
HELD = 3
FULL = pytest.mark.full


def kind_of(layout: str) -> Kind:
    return Kind(nodes=4, steps=12, arguments=("--layout", layout), script=SCRIPT)


def moved(training: Training, slot: int) -> Outcome:
    """Move a slot while rank 0 holds the step."""
    training.until_movable()
    training.cluster.move(training.job, training.node_of(slot))
    training.until(lambda status: status.phase in {"armed", "switching"})
    training.open_gate()
    return training.finish()


@pytest.mark.parametrize(
    ("layout", "slot"),
    [
        ("fsdp", 1),
        ("tp", 3),
        pytest.param("fsdp", 3, marks=FULL),
        pytest.param("hsdp", 1, marks=FULL),
        pytest.param("hsdp", 3, marks=FULL),
        pytest.param("tp", 1, marks=FULL),
    ],
)
def test_a_planned_move_of_a_part_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, layout: str, slot: int
) -> None:
    kind = kind_of(layout)
    training = Training(cluster, kind, hold_at=HELD)

    outcome = moved(training, slot)

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("hsdp", 0),
        ("tp", 3),
        pytest.param("hsdp", 3, marks=FULL),
        pytest.param("tp", 0, marks=FULL),
    ],
)
def test_a_lost_part_is_taken_from_its_replica(
    cluster: LocalCluster, undisturbed: Twin, layout: str, rank: int
) -> None:
    kind = kind_of(layout)
    training = Training(cluster, kind, inject=f"kill:rank={rank},step=5,point=before_vote")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() <= 1
    assert outcome.status.epoch > 1


@pytest.mark.parametrize("rank", [pytest.param(0, marks=FULL), 2])
@pytest.mark.parametrize(
    "when",
    [
        pytest.param("step=11,point=after_body", marks=FULL),
        pytest.param("step=12,point=before_vote", marks=FULL),
        "step=12,point=in_vote",
        pytest.param("step=12,point=after_update", marks=FULL),
        "point=at_finish",
    ],
)
def test_a_part_lost_after_the_last_step_asks_no_rank_for_a_step_that_it_has_left(
    cluster: LocalCluster, undisturbed: Twin, when: str, rank: int
) -> None:
    kind = kind_of("fsdp")
    training = Training(cluster, kind, inject=f"kill:rank={rank},{when}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1)
    assert outcome.status.epoch > 1
    assert not any("start afresh" in note for note in outcome.status.notes)


MORE = ["step_open", "in_vote", "before_update", "after_body"]


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=FULL)])
@pytest.mark.parametrize(
    "point",
    ["before_vote", "after_update", *(pytest.param(point, marks=FULL) for point in MORE)],
)
def test_without_replicas_all_return_to_copies(
    cluster: LocalCluster, undisturbed: Twin, point: str, rank: int
) -> None:
    kind = kind_of("fsdp")
    training = Training(cluster, kind, inject=f"kill:rank={rank},step=6,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1)
    returned = {line["step"] for line in outcome.events("returned")}
    assert len(returned) == 1
    assert min(returned) >= 4


@FULL
def test_two_lost_nodes_that_do_not_keep_for_each_other_are_replaced(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = kind_of("fsdp")
    faults = ";".join(f"kill:rank={rank},step=6,point=before_vote" for rank in (0, 2))
    training = Training(cluster, kind, standby=2, inject=faults)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1)
    assert len({line["worker"] for line in outcome.events("handoff_end")}) == 2


TWO_COPIES = {"TMOVER_WORKER_COPIES": "2"}


def both(*slots: int, when: str) -> str:
    """Return the loss of the nodes that begin in these slots; a restart loses no more."""
    return ";".join(f"killnode:node=node{slot + 1}-,{when}" for slot in slots)


@pytest.mark.parametrize(
    ("slots", "when", "back_to"),
    [
        ((1, 2), "step=6,point=before_vote", 4),
        pytest.param((3, 0), "step=6,point=in_vote", 4, marks=FULL),
        pytest.param((0, 1), "step=6,point=after_update", 5, marks=FULL),
        pytest.param((1, 2), "point=at_finish", 11, marks=FULL),
    ],
)
def test_a_node_is_lost_with_its_first_keeper_where_two_keep_its_copies(
    cluster: LocalCluster, undisturbed: Twin, slots: tuple[int, int], when: str, back_to: int
) -> None:
    """Of steps that were begun as many are done again as between two copies, and one."""
    kind = kind_of("fsdp")
    inject = both(*slots, when=when)
    training = Training(cluster, kind, standby=2, inject=inject, settings=TWO_COPIES)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1, lost=2)
    assert min(line["step"] for line in outcome.events("returned")) >= back_to
    assert len({line["worker"] for line in outcome.events("handoff_end")}) == 2
    assert (outcome.status.redundancy, outcome.status.copies) == ("copies", 2)
    assert not any("start afresh" in note for note in outcome.status.notes)


@FULL
def test_a_node_is_lost_with_its_only_keeper_and_all_start_afresh(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = kind_of("fsdp")
    inject = both(1, 2, when="step=6,point=before_vote")
    training = Training(cluster, kind, standby=2, inject=inject)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=kind.steps, lost=2)
    assert any("start afresh" in note for note in outcome.status.notes)


def test_a_job_with_too_few_nodes_for_its_copies_ends_at_once(cluster: LocalCluster) -> None:
    kind = kind_of("fsdp")
    training = Training(cluster, kind, settings={"TMOVER_WORKER_COPIES": "4"})

    outcome = training.finish()

    assert outcome.status.code == 1
    assert "copies = 4: a job on 4 nodes has 3 other" in outcome.status.outcome
    assert not outcome.committed


@FULL
def test_two_nodes_of_two_ranks_are_lost_of_three(cluster: LocalCluster, undisturbed: Twin) -> None:
    kind = dataclasses.replace(kind_of("fsdp"), nodes=3, nproc=2)
    inject = both(1, 2, when="step=6,point=before_vote")
    training = Training(cluster, kind, standby=2, inject=inject, settings=TWO_COPIES)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1, lost=2)
    assert min(line["step"] for line in outcome.events("returned")) >= 4


@FULL
def test_two_losses_some_steps_after_a_planned_move_find_copies_of_all(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    """The joiner's wards have sent it theirs, and its keepers have its own, by then."""
    kind = kind_of("fsdp")
    inject = both(2, 3, when=f"step={HELD + 4},point=before_vote")
    training = Training(cluster, kind, standby=3, hold_at=HELD, inject=inject, settings=TWO_COPIES)

    outcome = moved(training, 1)

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1, lost=2)
    assert outcome.events("returned")


def test_a_joiner_that_dies_while_it_receives_a_copy_is_replaced(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    """The first one is the only standby that there is; another is ordered in its place."""
    kind = kind_of("fsdp")
    faults = "killnode:rank=1,step=6,point=before_vote;kill:sandbox=1,node=node5,point=in_handoff"
    training = Training(cluster, kind, standby=1, inject=faults)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1)
    assert len({line["worker"] for line in outcome.events("handoff_begin")}) == 2


@pytest.mark.parametrize(
    "lost", [pytest.param(0, id="ward", marks=FULL), pytest.param(2, id="keeper")]
)
def test_a_loss_some_steps_after_a_planned_move_finds_copies_of_all(
    cluster: LocalCluster, undisturbed: Twin, lost: int
) -> None:
    """The joiner's neighbours have sent it theirs, and taken its own, by then."""
    kind = kind_of("fsdp")
    inject = f"kill:rank={lost},step={HELD + 4},point=before_vote"
    training = Training(cluster, kind, standby=2, hold_at=HELD, inject=inject)

    outcome = moved(training, 1)

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1)
    assert outcome.events("returned")


def test_copies_may_be_made_less_often(cluster: LocalCluster, undisturbed: Twin) -> None:
    kind = kind_of("fsdp")
    training = Training(
        cluster,
        kind,
        inject="kill:rank=1,step=8,point=before_vote",
        settings={"TMOVER_WORKER_COPY_EVERY": "3"},
    )

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=3)
    assert {line["step"] for line in outcome.events("returned")} <= {2, 5}
