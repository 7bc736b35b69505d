"""Jobs without a batch host: any node can be given back, the first one included."""

from __future__ import annotations

import pytest

from support.lab import Lab
from support.slurmjobs import HELD, KIND, Cluster
from support.training import Outcome, assert_as_if_undisturbed

pytestmark = pytest.mark.timeout(600)


def test_the_first_node_is_given_back_like_any_other(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    cluster.hold_at(HELD, 40, later=1)
    job = cluster.submit("--headless")
    job.until_held()
    leaver = job.node(0)

    lab.run("scontrol", "update", f"NodeName={leaver}", "State=DRAIN", "Reason=firmware")
    job.until_armed()
    job.go_on()
    job.until(
        lambda status: any(f"{leaver} is given back to Slurm" in note for note in status.notes),
        f"{leaver} given back",
    )
    nodes = {one.id: one.nodes for one in lab.squeue()}[job.id]
    job.go_on(40)
    outcome = job.finish()

    assert nodes == "node[2-4]"
    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.redone() == 0


@pytest.mark.full
def test_a_headless_job_outlives_the_loss_of_its_first_node(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    job = cluster.submit("--headless")
    job.until_held()

    lab.power_off(job.node(0))
    outcome = job.finish()

    assert_as_if_undisturbed(outcome, undisturbed, KIND)
