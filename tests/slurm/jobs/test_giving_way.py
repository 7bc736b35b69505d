"""Nodes that are to be left: drained by hand, or in a maintenance window. No step is lost."""

from __future__ import annotations

import pytest

from support.lab import Lab
from support.slurmjobs import HELD, KIND, Cluster, Job
from support.training import Outcome, assert_as_if_undisturbed

pytestmark = pytest.mark.timeout(600)


def nodes_of(lab: Lab, job: Job) -> str:
    """Return which nodes Slurm's job has."""
    return {one.id: one.nodes for one in lab.squeue()}.get(job.id, "")


def test_a_drained_node_is_left_given_back_and_replaced(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    cluster.hold_at(HELD, 40)
    job = cluster.submit()
    job.until_held()
    leaver = job.node(2)

    lab.run("scontrol", "update", f"NodeName={leaver}", "State=DRAIN", "Reason=bad fan")
    job.until_armed()
    job.go_on()
    job.until(
        lambda status: any(f"{leaver} is given back to Slurm" in note for note in status.notes),
        f"{leaver} given back",
    )
    job.go_on(40)
    outcome = job.finish()

    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.redone() == 0
    assert any(f"{leaver} is to be left: bad fan" in note for note in outcome.status.notes)
    assert lab.states()[leaver] == "idle+drain"


@pytest.mark.full
def test_the_batch_host_can_be_left_and_stays_allocated(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    job = cluster.submit()
    job.until_held()
    leaver = job.node(0)

    cluster.tmover("migrate", leaver, "--no-wait")
    job.until_armed()
    job.go_on()
    outcome = job.finish()

    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert any(
        f"{leaver} stays allocated until Slurm job {job.id} ends: it is the batch host" in note
        for note in outcome.status.notes
    )


def test_a_used_standby_is_ordered_anew_on_another_node(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    cluster.hold_at(HELD, 40)
    job = cluster.submit()
    first = job.until_held().standbys[0].node
    leaver = job.node(1)

    lab.power_off(leaver)
    job.until_lost(leaver)
    job.go_on()
    status = job.until(
        lambda status: (
            status.phase == "training"
            and any(s.state == "warm" and s.node != first for s in status.standbys)
        ),
        "another standby",
    )
    job.go_on(40)

    assert {s.node for s in status.standbys}.isdisjoint({leaver, *(s.node for s in status.slots)})
    assert_as_if_undisturbed(job.finish(), undisturbed, KIND)


def test_training_is_moved_off_a_node_before_its_maintenance(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    job = cluster.submit()
    job.until_held()
    leaver = job.node(3)
    lab.reserve("maint1", leaver, start="now+600")
    assert cluster.tmover("maintenance", "run", "--lead", "5m").stdout == ""

    said = cluster.tmover("maintenance", "run", "--lead", "30m", "--wait", "1s", check=False)
    job.until_armed()
    job.go_on()
    job.until(lambda status: status.epoch == 2 and status.phase == "training", "the move's end")
    again = cluster.tmover("maintenance", "run", "--lead", "30m")
    outcome = job.finish()

    assert leaver in said.stdout
    assert said.returncode == 1, said
    assert again.returncode == 0, again
    assert leaver not in {slot.node for slot in outcome.status.slots}
    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.redone() == 0
