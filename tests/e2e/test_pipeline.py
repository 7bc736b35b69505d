"""Pipelines: the layers of a lost stage come from the same stage elsewhere, or from its copy."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

SCRIPT = pathlib.Path(__file__).parent / "train_pipeline.py"
HELD = 3
FULL = pytest.mark.full


def kind_of(pipelines: int, *arguments: str) -> Kind:
    return Kind(
        nodes=2 * pipelines,
        steps=12,
        arguments=("--pipelines", str(pipelines), *arguments),
        script=SCRIPT,
    )


@pytest.mark.parametrize("pipelines", [pytest.param(1, marks=FULL), 2])
@pytest.mark.parametrize(
    "last", [pytest.param(False, id="first stage", marks=FULL), pytest.param(True, id="last stage")]
)
def test_a_planned_move_of_a_stage_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, pipelines: int, last: bool
) -> None:
    kind = kind_of(pipelines)
    training = Training(cluster, kind, hold_at=HELD)
    training.until_movable()
    training.cluster.move(training.job, training.node_of(kind.nodes - 1 if last else 0))
    training.until(lambda status: status.phase in {"armed", "switching"})
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0
    assert outcome.status.epoch > 1


MORE = [
    "step_open", "before_vote", "in_vote", "after_vote", "before_update", "after_update",
    "after_body",
]  # fmt: skip
DEATHS = pytest.mark.parametrize(
    "point", ["in_backward", *(pytest.param(point, marks=FULL) for point in MORE)]
)


@DEATHS
@pytest.mark.parametrize(
    "rank", [pytest.param(0, id="first stage", marks=FULL), pytest.param(3, id="last stage")]
)
def test_a_lost_stage_is_taken_from_the_pipeline_beside_it(
    cluster: LocalCluster, undisturbed: Twin, point: str, rank: int
) -> None:
    kind = kind_of(2)
    training = Training(cluster, kind, inject=f"kill:rank={rank},step=6,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() <= 1
    assert outcome.status.epoch > 1
    assert not outcome.events("returned")


@DEATHS
@pytest.mark.parametrize("rank", [0, 1], ids=["first stage", "last stage"])
def test_a_stage_that_nobody_else_holds_returns_from_its_copy(
    cluster: LocalCluster, undisturbed: Twin, point: str, rank: int
) -> None:
    kind = kind_of(1)
    training = Training(cluster, kind, inject=f"kill:rank={rank},step=6,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1)
    (returned,) = {line["step"] for line in outcome.events("returned")}
    assert returned >= 4


@FULL
def test_a_pipeline_that_is_lost_as_a_whole_is_taken_from_the_one_beside_it(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = kind_of(2)
    faults = ";".join(f"kill:rank={rank},step=6,point=before_vote" for rank in (1, 3))
    training = Training(cluster, kind, standby=2, inject=faults)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert not outcome.events("returned")
    assert len({line["worker"] for line in outcome.events("handoff_end")}) == 2


@FULL
def test_all_forward_before_all_backward_is_a_step_too(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = kind_of(1, "--schedule", "gpipe")
    training = Training(cluster, kind, inject="kill:rank=1,step=6,point=in_backward")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1)
    assert outcome.events("returned")
