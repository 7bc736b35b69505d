"""Whole nodes, agents and controllers that die; several ranks per node."""

from __future__ import annotations

import pathlib
import time

import pytest

from e2e.conftest import Twin
from support.eventually import eventually
from support.training import PATIENCE_S, Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.process import is_alive

KIND = Kind()
HELD = 5


@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("what", ["fail_node", "kill_agent", "kill_worker"])
def test_what_dies_outside_of_a_step_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, what: str, slot: int
) -> None:
    training = Training(cluster, KIND, hold_at=HELD)
    training.until_movable()

    getattr(cluster, what)(training.node_of(slot))
    training.open_gate()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)


@pytest.mark.parametrize("point", ["in_backward", "in_vote", "after_update"])
def test_a_node_with_two_ranks_that_dies_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str
) -> None:
    kind = Kind(nodes=2, nproc=2)
    inject = f"killnode:rank=2,step=7,point={point}"
    training = Training(cluster, kind, inject=inject)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)


def test_a_planned_move_of_two_ranks_at_once_redoes_no_step(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = Kind(nodes=2, nproc=2)
    training = Training(cluster, kind, hold_at=HELD)
    training.until_movable()

    cluster.move(training.job, training.node_of(0))
    training.until(lambda status: status.phase == "armed")
    training.open_gate()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0


def test_a_job_without_a_controller_trains_on_and_never_notices(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, KIND, hold_at=HELD)
    training.until_movable()

    cluster.kill_controller()
    training.open_gate()
    training.until_traced("finished", KIND.nodes)
    cluster.ensure_controller()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 0


def test_a_failure_while_no_controller_runs_is_recovered_when_one_returns(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, KIND, hold_at=HELD)
    training.until_movable()
    node = training.node_of(1)

    cluster.kill_controller()
    cluster.fail_node(node)
    training.open_gate()
    training.until_traced("revoked", 1)
    cluster.ensure_controller()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)


@pytest.mark.parametrize("phase", ["preparing", "armed"])
def test_a_controller_that_dies_in_a_move_ends_it_after_its_return(
    cluster: LocalCluster, undisturbed: Twin, phase: str
) -> None:
    kind = Kind(steps=24)
    training = Training(cluster, kind, hold_at=HELD)
    training.until_movable()

    cluster.move(training.job, training.node_of(1))
    if phase == "armed":
        training.until(lambda status: status.phase == "armed")
    cluster.kill_controller()
    training.open_gate()
    training.until_traced("finished", 2)
    cluster.ensure_controller()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0


def test_a_rank_lost_after_its_last_step_is_replaced_before_the_job_ends(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, KIND, inject="killnode:rank=0,point=at_finish")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert "node1" not in {slot.node for slot in outcome.status.slots}


def test_a_rank_waits_for_a_standby_as_long_as_there_is_a_controller(
    cluster: LocalCluster, undisturbed: Twin, tmp_path: pathlib.Path
) -> None:
    fence_s, gate = 1.0, tmp_path / "let the standby begin"
    script = tmp_path / "late.py"
    script.write_text(
        "import os, pathlib, runpy, time\n"
        "from support.training import SCRIPT\n"
        f"gate = pathlib.Path({str(gate)!r})\n"
        "while os.environ['TMOVER_ROLE'] == 'standby' and not gate.exists():\n"
        "    time.sleep(0.02)\n"
        "runpy.run_path(str(SCRIPT), run_name='__main__')\n"
    )
    settings = {"TMOVER_WORKER_FENCE_AFTER_S": str(fence_s)}
    training = Training(
        cluster,
        KIND,
        inject="killnode:rank=1,step=7,point=in_vote",
        script=script,
        settings=settings,
    )

    training.until(lambda status: status.phase == "waiting")
    enough = time.monotonic() + 3 * fence_s
    training.until(lambda _: time.monotonic() > enough)
    gate.touch()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert not any("start afresh" in note for note in outcome.status.notes)


def test_ranks_of_a_broken_world_without_a_controller_commit_nothing_and_end_themselves(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    settings = {"TMOVER_WORKER_FENCE_AFTER_S": "1.0"}
    training = Training(cluster, KIND, hold_at=HELD, settings=settings)
    training.until_movable()
    lost, others = training.node_of(1), [training.node_of(slot) for slot in (0, 2)]
    ranks = [training.worker(node) for node in others]

    cluster.kill_controller()
    cluster.fail_node(lost)
    training.open_gate()
    eventually(lambda: not any(map(is_alive, ranks)), timeout_s=PATIENCE_S)
    lines = training.lines()
    cluster.ensure_controller()
    outcome = training.finish()

    revoked = [line["t"] for line in lines if line["event"] == "revoked"]
    committed = [line["t"] for line in lines if line["event"] == "committed"]
    assert revoked
    assert max(committed) < min(revoked)
    assert outcome.status.code == 0
    assert outcome.finals == undisturbed(KIND).finals
