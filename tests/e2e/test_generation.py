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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["in_backward", "in_vote"])
def test_a_worker_that_dies_in_a_step_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str, rank: int
) -> None:
    training = Training(cluster, KIND, inject=f"kill:rank={rank},step=7,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() <= 1
