"""A process or a node dies at a named point; the job ends with the bits of a run without that."""

from __future__ import annotations

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

KIND = Kind()
POINTS = (
    "step_open",
    "before_backward",
    "in_backward",
    "before_vote",
    "in_vote",
    "after_vote",
    "before_update",
    "after_update",
    "after_body",
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_dies_in_a_step_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str, rank: int
) -> None:
    training = Training(cluster, KIND, inject=f"kill:rank={rank},step=7,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() <= 1


def test_a_redo_moves_no_uncounted_buffer_twice_and_loses_no_late_change(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = Kind(arguments=("--codes", "--late", "average"))
    training = Training(cluster, kind, inject="kill:rank=1,step=7,point=before_vote")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 1
