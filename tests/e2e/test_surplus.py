"""Standbys that nobody needs: they never harm the job, and leave cleanly when it ends."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from e2e.conftest import Twin
from support.eventually import eventually
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.scheduler.interface import NodeState
from tmover.scheduler.store import StepStatus, Store

SCRIPT = pathlib.Path(__file__).parent / "train_captured.py"
THREE = Kind(nodes=3, steps=12, script=SCRIPT)
ROLES = Kind(nodes=3, steps=12, script=SCRIPT, arguments=("--roles",))
PAIR = Kind(nodes=2, steps=12, script=SCRIPT)
TRIED = 3
"""The step that a standby tries in place; it has rehearsed those before."""


def held(step: int, gate: pathlib.Path) -> str:
    """Return the fault that holds standbys in a step, as rank 0, until `gate` is there."""
    return f"hold:sandbox=1,rank=0,step={step},point=step_open,until={gate}"


def ends(cluster: LocalCluster) -> dict[str, StepStatus]:
    """Return how what was started last on each node has ended."""
    store = Store(cluster.state / "cluster")
    found = {name: store.status(record.step) for name, record in store.nodes().items()}
    return {name: status for name, status in found.items() if status is not None}


@pytest.mark.parametrize(
    ("kind", "step", "harm", "said"),
    [
        pytest.param(
            THREE, TRIED, LocalCluster.kill_worker, "afresh as a standby", id="proving, worker"
        ),
        pytest.param(
            THREE, TRIED, LocalCluster.fail_node, "is lost", id="proving, node",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ROLES, 0, LocalCluster.kill_worker, "afresh as a standby", id="another role, worker",
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_standby_that_dies_in_a_rehearsal_harms_nothing(
    cluster: LocalCluster,
    undisturbed: Twin,
    tmp_path: pathlib.Path,
    kind: Kind,
    step: int,
    harm: Callable[[LocalCluster, str], float],
    said: str,
) -> None:
    training = Training(cluster, kind, hold_at=3, inject=held(step, tmp_path / "never"))
    training.until_held()
    training.until_traced("fault", 1)
    before = cluster.status(training.job)
    [standby] = before.standbys

    harm(cluster, standby.node)

    after = training.until(lambda status: any(said in note for note in status.notes))
    assert (after.phase, after.epoch) == (before.phase, before.epoch)
    training.open_gate()
    outcome = training.finish()
    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0
    assert outcome.events("revoked") == []
    assert outcome.status.incidents == ()


def test_of_more_standbys_than_slots_none_hinders_the_end_in_the_middle_of_a_rehearsal(
    cluster: LocalCluster, undisturbed: Twin, tmp_path: pathlib.Path
) -> None:
    gate = tmp_path / "gate"
    training = Training(cluster, PAIR, standby=3, hold_at=3, inject=held(TRIED, gate))
    training.until_held()
    training.until_traced("fault", 3)
    training.open_gate()

    outcome = training.finish()
    gate.touch()

    assert_as_if_undisturbed(outcome, undisturbed(PAIR), PAIR)
    assert outcome.events("revoked") == []
    eventually(lambda: len(ends(cluster)) == 5)
    assert {status.code for status in ends(cluster).values()} == {0}
    assert "Traceback" not in training.log()
    eventually(lambda: {node.state for node in cluster.scheduler.nodes()} == {NodeState.IDLE})


def test_a_standby_that_comes_when_the_job_has_ended_ends_well_and_says_so(
    cluster: LocalCluster,
) -> None:
    training = Training(cluster, PAIR, standby=0)
    assert training.finish().status.code == 0
    eventually(lambda: len(ends(cluster)) == 2)

    node = cluster.scheduler.order(training.job, exclude=("node1", "node2"))

    assert node is not None
    eventually(lambda: node in ends(cluster))
    assert ends(cluster)[node].code == 0
    assert f"tmover: node {node}: the job has ended: done" in training.log()
