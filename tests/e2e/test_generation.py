"""The same jobs, their collectives carried by torch's own communicators."""

from __future__ import annotations

import pytest

from e2e.conftest import Twin
from e2e.test_moves import HELD, LEAVER, move_one
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

KIND = Kind(steps=24, fabric="generation")


def test_a_planned_move_redoes_no_step_and_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, KIND, hold_at=HELD)
    left = training.node_of(LEAVER) if training.until_movable() else ""

    outcome = move_one(training)

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 0
    assert left not in {slot.node for slot in outcome.status.slots}
    opened = {line["worker"].split("-")[0]: line["links"] for line in outcome.events("passed")}
    lanes = 3  # revocation, votes, and where communicators are built
    assert opened == {"node1": lanes, "node3": lanes, "node4": 2 * lanes}


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("point", ["in_backward", "in_vote"])
def test_a_worker_that_dies_in_a_step_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str, rank: int
) -> None:
    training = Training(cluster, KIND, inject=f"kill:rank={rank},step=7,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() <= 1


def test_gloo_that_fails_again_and_again_between_live_ranks_ends_the_job(
    cluster: LocalCluster,
) -> None:
    training = Training(cluster, KIND, standby=0, arguments=("--cut-at", "7"))

    outcome = training.finish()

    assert outcome.status.code == 1
    assert "the world broke 3 times after step 6" in outcome.status.outcome
    assert "a communicator inside a group failed in epoch 3" in training.log()
    assert {line["step"] for line in outcome.events("committed")} == set(range(7))
