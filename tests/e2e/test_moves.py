"""Planned moves: nothing is lost, and whoever dies at whatever moment of one changes no bit."""

from __future__ import annotations

import pytest

from e2e.conftest import Twin
from support.eventually import eventually
from support.training import Kind, Outcome, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

KIND = Kind(steps=24)
HELD = 3
LEAVER = 1
"""The slot that is left; rank 1 in a job with one rank per node."""


def move_one(training: Training) -> Outcome:
    """Move slot 1 while rank 0 holds the step, so that the move is under way before it goes on."""
    training.until_movable()
    training.cluster.move(training.job, training.node_of(LEAVER))
    training.until(
        lambda status: (
            status.phase in {"armed", "switching", "revoked", "waiting"}
            or (status.phase == "training" and any("called off" in note for note in status.notes))
        )
    )
    training.open_gate()
    return training.finish()


def test_a_planned_move_redoes_no_step_and_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, KIND, hold_at=HELD)
    left = training.node_of(LEAVER) if training.until_movable() else ""

    outcome = move_one(training)

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 0
    assert left not in {slot.node for slot in outcome.status.slots}
    eventually(lambda: "node2: released" in training.log())  # its agent may end after the job


def test_what_changes_after_the_vote_arrives_as_it_stands_at_the_boundary(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = Kind(steps=24, arguments=("--codes", "--late", "average", "count"))
    training = Training(cluster, kind, hold_at=HELD)

    outcome = move_one(training)

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0
    assert "`count` changed after optimizer.step()" in training.log()


def test_the_joiner_opens_one_link_to_each_stayer_and_stayers_none_to_each_other(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, KIND, hold_at=HELD)

    outcome = move_one(training)

    opened = {line["worker"].split("-")[0]: line["links"] for line in outcome.events("passed")}
    lanes = 3  # revocation, votes, and the data of the script's one group, which stayers foresee
    assert opened == {"node1": lanes, "node3": lanes, "node4": 2 * (lanes - 1)}
    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)


def test_a_move_asked_for_before_the_first_step_waits_until_buckets_are_laid_anew(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, KIND, hold_at=0)

    outcome = move_one(training)

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 0
    assert min(line["step"] for line in outcome.events("passed")) >= 1


@pytest.mark.parametrize("step", [0, 1])
def test_a_failure_before_the_world_has_settled_starts_all_afresh(
    cluster: LocalCluster, undisturbed: Twin, step: int
) -> None:
    training = Training(cluster, KIND, hold_at=step)
    training.until_movable()

    cluster.fail_node(training.node_of(1))
    training.open_gate()
    outcome = training.finish()

    assert outcome.status.code == 0
    assert outcome.finals == undisturbed(KIND).finals


@pytest.mark.parametrize(
    "point", ["in_prepare", "in_handoff", "before_barrier", "in_barrier", "after_barrier"]
)
def test_a_joiner_that_dies_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str
) -> None:
    training = Training(
        cluster, KIND, hold_at=HELD, standby=2, inject=f"kill:sandbox=1,node=node4,point={point}"
    )

    outcome = move_one(training)

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    passed_somewhere = point in {"in_barrier", "after_barrier"}
    assert outcome.redone() <= (1 if passed_somewhere else 0)


@pytest.mark.parametrize("point", ["in_prepare", "before_barrier", "in_barrier", "after_barrier"])
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_stayer_that_dies_in_a_move_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str, rank: int
) -> None:
    training = Training(
        cluster, KIND, hold_at=HELD, standby=2, inject=f"kill:rank={rank},point={point}"
    )

    outcome = move_one(training)

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)


@pytest.mark.parametrize("point", ["in_vote", "after_vote", "before_handoff", "after_handoff"])
def test_a_leaver_that_dies_in_its_move_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str
) -> None:
    step = f",step={HELD + 1}" if "vote" in point else ""
    training = Training(
        cluster, KIND, hold_at=HELD, standby=2, inject=f"kill:rank={LEAVER},point={point}{step}"
    )

    outcome = move_one(training)

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)


@pytest.mark.parametrize("point", ["before_barrier", "in_barrier", "after_barrier"])
def test_a_second_failure_inside_a_recovery_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str
) -> None:
    kind = Kind(nodes=4)
    training = Training(
        cluster,
        kind,
        standby=2,
        inject=f"kill:rank=1,step=7,point=in_vote;kill:rank=3,point={point}",
    )

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)


def test_a_node_and_the_keeper_of_its_records_lost_at_once_start_the_job_afresh(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, KIND, standby=2, hold_at=HELD)
    training.until_movable()

    cluster.fail_node(training.node_of(1))
    cluster.fail_node(training.node_of(2))
    training.open_gate()
    training.until(lambda status: any("start afresh" in note for note in status.notes))
    outcome = training.finish()

    assert outcome.status.code == 0
    assert outcome.finals == undisturbed(KIND).finals
