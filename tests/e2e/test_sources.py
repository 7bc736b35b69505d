"""Who a joiner gets its state from: several replicas at once, or a copy once they have parted."""

from __future__ import annotations

import dataclasses
import re

import pytest

from e2e.conftest import Twin
from support.training import Kind, Outcome, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

HELD = 2
BIG = Kind(nodes=3, steps=6, arguments=("--hidden", "2500"))
"""Its state is of 75 MB: worth a second source."""
ALONE = Kind(nodes=3, steps=10, arguments=("--alone", "4"))
"""Its ranks stop averaging gradients after a while, as local SGD does."""


def helpers(outcome: Outcome) -> set[int]:
    return {line["rank"] for line in outcome.events("helped")}


def test_a_leaver_and_a_stayer_send_a_state_together(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, BIG, hold_at=HELD)
    training.until_movable()
    training.cluster.move(training.job, training.node_of(1))
    training.until(lambda status: status.phase in {"armed", "switching"})
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(BIG), BIG)
    assert outcome.redone() == 0
    assert helpers(outcome) == {2}


@pytest.mark.full
def test_two_replicas_send_what_a_lost_rank_held(cluster: LocalCluster, undisturbed: Twin) -> None:
    training = Training(cluster, BIG, inject="kill:rank=1,step=3,point=before_vote")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(BIG), BIG)
    assert helpers(outcome) == {0}


def test_a_second_source_that_dies_in_the_hand_off_is_replaced_too(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    """Rank 2 keeps the records of rank 1, and is its first source; rank 3 is the second."""
    kind = dataclasses.replace(BIG, nodes=4)
    lost = "kill:rank=1,step=3,point=before_vote"
    training = Training(
        cluster, kind, standby=2, inject=f"{lost};kill:rank=3,node=node4-,point=before_handoff"
    )

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 1
    assert not any("all workers start afresh" in note for note in outcome.status.notes)
    assert {line["rank"] for line in outcome.events("fault")} == {1, 3}


LATE = pytest.mark.parametrize("late", [pytest.param("count", marks=pytest.mark.full), "whole"])


@LATE
@pytest.mark.parametrize(
    "point", ["before_vote", pytest.param("after_update", marks=pytest.mark.full)]
)
def test_what_a_rank_alone_holds_and_changes_after_votes_is_in_copies(
    cluster: LocalCluster, undisturbed: Twin, late: str, point: str
) -> None:
    """Such as the average of a model with BatchNorm: no record of a vote has it as it is."""
    kind = Kind(nodes=3, steps=12, arguments=("--late", late))
    training = Training(cluster, kind, inject=f"kill:rank=1,step=8,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1)
    assert outcome.status.redundancy == "copies"
    assert re.search(r"changed after optimizer.step\(\) of step [0-3] and differs", training.log())


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_replicas_that_part_keep_copies_from_then_on(
    cluster: LocalCluster, undisturbed: Twin, rank: int
) -> None:
    training = Training(cluster, ALONE, inject=f"kill:rank={rank},step=8,point=before_vote")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(ALONE), ALONE, undone=1)
    assert outcome.status.redundancy == "copies"
    assert "do not any more" in training.log()


@pytest.mark.full
@pytest.mark.parametrize("step", [4, 5, 6])
def test_a_loss_just_after_replicas_have_parted_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, step: int
) -> None:
    """They part in the update of step 4: there may be no copy yet, and all start afresh."""
    inject = f"kill:rank=1,node=node2-,step={step},point=before_vote"
    training = Training(cluster, ALONE, inject=inject)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(ALONE), ALONE, undone=ALONE.steps)
