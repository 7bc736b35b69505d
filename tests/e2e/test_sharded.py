"""Models of which no rank holds all: moved and recovered like any other, with the same bits."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Outcome, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

SCRIPT = pathlib.Path(__file__).parent / "train_sharded.py"
HELD = 3
LAYOUTS = ["fsdp", "hsdp", "tp"]


def kind_of(layout: str) -> Kind:
    return Kind(nodes=4, steps=12, arguments=("--layout", layout), script=SCRIPT)


def moved(training: Training, slot: int) -> Outcome:
    """Move a slot while rank 0 holds the step."""
    training.until_movable()
    training.cluster.move(training.job, training.node_of(slot))
    training.until(lambda status: status.phase in {"armed", "switching"})
    training.open_gate()
    return training.finish()


@pytest.mark.parametrize("slot", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_planned_move_of_a_part_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, layout: str, slot: int
) -> None:
    kind = kind_of(layout)
    training = Training(cluster, kind, hold_at=HELD)

    outcome = moved(training, slot)

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0


@pytest.mark.parametrize("layout", ["hsdp", "tp"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_lost_part_is_taken_from_its_replica(
    cluster: LocalCluster, undisturbed: Twin, layout: str, rank: int
) -> None:
    kind = kind_of(layout)
    training = Training(cluster, kind, inject=f"kill:rank={rank},step=5,point=before_vote")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() <= 1
    assert outcome.status.epoch > 1


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "when",
    [
        "step=11,point=after_body",
        "step=12,point=before_vote",
        "step=12,point=in_vote",
        "step=12,point=after_update",
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


POINTS = ["step_open", "before_vote", "in_vote", "before_update", "after_update", "after_body"]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("point", POINTS)
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
