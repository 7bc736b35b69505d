"""Streams: a joiner goes on with the batches that the lost rank would have had."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

SCRIPT = pathlib.Path(__file__).parent / "train_stream.py"
STEPS = 24
"""Two passes and a half."""


def kind_of(data: str, workers: int) -> Kind:
    arguments = ("--data", data, "--workers", str(workers))
    return Kind(nodes=2, steps=STEPS, arguments=arguments, script=SCRIPT)


@pytest.mark.parametrize(
    ("data", "workers"),
    [
        ("state", 2),
        pytest.param("replay", 1, marks=pytest.mark.full),
        pytest.param("state", 0, marks=pytest.mark.full),
        pytest.param("own", 0, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("step", [pytest.param(6, marks=pytest.mark.full), 10])
def test_a_killed_rank_of_a_stream_is_taken_over_bit_for_bit(
    cluster: LocalCluster, undisturbed: Twin, data: str, workers: int, step: int
) -> None:
    """Step 10 is the first of the second pass."""
    kind = kind_of(data, workers)
    training = Training(cluster, kind, inject=f"kill:rank=1,step={step},point=before_vote")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.status.epoch > 1
    assert outcome.status.placing == ("replay" if data == "replay" else "state")
    assert ("the loader cannot go straight to a position" in training.log()) == (data == "replay")


def test_a_planned_move_of_a_stream_loses_no_batch(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = kind_of("state", 2)
    training = Training(cluster, kind, hold_at=7)
    training.until_movable()
    training.cluster.move(training.job, training.node_of(1))
    training.until(lambda status: status.phase in {"armed", "switching"})
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0
    assert outcome.status.epoch > 1


def test_samples_that_depend_on_what_was_read_before_end_the_job_at_its_first_step(
    cluster: LocalCluster,
) -> None:
    training = Training(cluster, kind_of("counted", 1), standby=0)

    outcome = training.finish()

    assert outcome.status.code == 1
    assert outcome.committed == {}
    assert "what `Counted` returns" in outcome.status.outcome
    assert "what `Counted` returns for a sample depends on more than its number" in training.log()
