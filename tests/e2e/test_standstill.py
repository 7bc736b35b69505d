"""Ranks that are slow, stopped, frozen or stuck: the one all wait for is named, or replaced."""

from __future__ import annotations

import signal

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cli.status import render
from tmover.cluster import LocalCluster
from tmover.process import send_signal

KIND = Kind()
HELD = 5
FOREVER = Kind(steps=100_000)
SLOW = 1


def test_a_rank_that_is_slow_in_every_step_is_named(cluster: LocalCluster) -> None:
    training = Training(cluster, FOREVER, standby=0, arguments=("--slow", str(SLOW), "0.05"))

    status = training.until(
        lambda status: any(wait.is_straggler and wait.steps >= 20 for wait in status.waits)
    )

    worst = status.waits[0]
    assert (worst.rank, worst.node, worst.is_straggler) == (SLOW, "node2", True)
    assert f"straggler: rank {SLOW} on node2, others wait " in render(status)


def test_a_worker_that_is_stopped_changes_no_bit(cluster: LocalCluster, undisturbed: Twin) -> None:
    """It never goes on by itself: that the job does, is its agent's doing."""
    training = Training(cluster, KIND, inject="stop:rank=1,step=7,point=in_backward")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 1


def test_a_node_that_freezes_changes_no_bit(cluster: LocalCluster, undisturbed: Twin) -> None:
    training = Training(cluster, KIND, hold_at=HELD)
    training.until_movable()

    for process in training.processes(training.node_of(1)):
        send_signal(process, signal.SIGSTOP)
    training.open_gate()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert any("not heard of for the lease" in note for note in outcome.status.notes)


@pytest.mark.parametrize(
    "point", ["in_backward", pytest.param("before_vote", marks=pytest.mark.full)]
)
def test_a_rank_that_hangs_is_suspected_and_then_replaced_and_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMOVER_CONTROLLER_STUCK_S", "4")
    never = cluster.state / "never"
    training = Training(cluster, KIND, inject=f"hold:rank=1,step=12,point={point},until={never}")

    status = training.until(lambda status: "all wait for rank 1" in status.suspect)
    outcome = training.finish()

    assert "suspect: no step for " in render(status)
    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert any("all wait for rank 1" in note for note in outcome.status.notes)
