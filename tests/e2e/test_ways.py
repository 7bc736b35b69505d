"""Other ways to train: each has a fault in its middle, and a move, and ends with the same bits.

The script has BatchNorm, dropout, and samples that torch, NumPy and Python augment, in all of them.
"""

from __future__ import annotations

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

STEP = 7
"""The step that is broken, or after which a rank moves."""
WAYS = {
    "accumulation": ("--micro", "2"),
    "loader workers that augment": ("--workers", "2"),
    "statistics of each rank": ("--apart",),
    "random generators of its own": ("--dice",),
    "an average of weights": ("--late", "average"),
    "a skipped update before": ("--overflow", str(STEP - 1)),
    "a skipped update": ("--overflow", str(STEP)),
    "a skipped update after": ("--overflow", str(STEP + 1)),
    "all of them": (
        *("--micro", "2", "--workers", "2", "--apart", "--dice", "--late", "average"),
        *("--overflow", str(STEP)),
    ),
}
KINDS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            Kind(arguments=way), id=name, marks=[pytest.mark.full] * (name != "all of them")
        )
        for name, way in WAYS.items()
    ],
)
OTHERS = ["step_open", "before_vote", "in_vote", "after_vote", "after_body"]


@KINDS
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "point",
    ["in_backward", *(pytest.param(point, marks=pytest.mark.full) for point in OTHERS)],
)
def test_a_rank_that_dies_in_the_middle_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, kind: Kind, point: str, rank: int
) -> None:
    """With accumulation, `in_backward` is in that of the first part."""
    training = Training(cluster, kind, inject=f"kill:rank={rank},step={STEP},point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() <= 1
    assert outcome.status.epoch > 1


@KINDS
@pytest.mark.parametrize("slot", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_planned_move_in_the_middle_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, kind: Kind, slot: int
) -> None:
    training = Training(cluster, kind, hold_at=STEP - 1)
    training.until_movable()
    training.cluster.move(training.job, training.node_of(slot))
    training.until(lambda status: status.phase in {"armed", "switching"})
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0
    assert min(line["step"] for line in outcome.events("passed")) == STEP
