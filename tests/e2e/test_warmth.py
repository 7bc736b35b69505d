"""A standby at rest: what it says of itself, and that it can still do a step."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.wire import JobStatus

HERE = pathlib.Path(__file__).parent
KIND = Kind(nodes=3, steps=12, script=HERE / "train_captured.py")
OFTEN = {"TMOVER_WORKER_PROVE_EVERY_S": "0.2"}


def proven(times: int, status: JobStatus) -> bool:
    return any(s.warmth is not None and s.warmth.proofs >= times for s in status.standbys)


def test_steps_that_are_done_to_prove_it_leave_nothing(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    lost = "killnode:rank=1,step=6,point=in_backward"
    training = Training(cluster, KIND, hold_at=3, inject=lost, settings=OFTEN)
    training.until_movable()
    status = training.until(lambda status: proven(3, status))
    [standby] = status.standbys
    assert standby.takes == (0, 1, 2)
    assert standby.warmth is not None
    assert standby.warmth.step_s > 0
    assert standby.warmth.state_bytes > 0
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.status.slots[1].agent == standby.agent


@pytest.mark.full
def test_a_standby_that_cannot_do_a_step_any_more_is_replaced(cluster: LocalCluster) -> None:
    kind = Kind(nodes=3, steps=12, script=KIND.script, arguments=("--tire", "8"))
    training = Training(cluster, kind, hold_at=3, settings=OFTEN)
    training.until_held()

    status = training.until(lambda s: any("it is tired" in note for note in s.notes))

    assert status.phase == "training"
    assert any("they are started afresh" in note for note in status.notes)
    training.open_gate()
    training.finish()
