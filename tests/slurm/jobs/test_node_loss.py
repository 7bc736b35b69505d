"""Nodes of a job on Slurm, lost in every way there is: training goes on, to the same bits."""

from __future__ import annotations

import time

import pytest

from support.lab import Lab
from support.slurmjobs import KIND, Cluster
from support.training import Outcome, assert_as_if_undisturbed

pytestmark = pytest.mark.timeout(600)


def test_a_node_without_power_is_replaced_long_before_slurm_misses_it(
    cluster: Cluster, undisturbed: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = cluster.lab
    job = cluster.submit()
    job.until_held()
    leaver = job.node(2)

    lab.power_off(leaver)
    off_at = time.monotonic()
    job.until_lost(leaver)
    ours_s = time.monotonic() - off_at
    job.go_on()
    outcome = job.finish()
    lab.wait(lambda: "down" in lab.states()[leaver], 60, f"Slurm's word on {leaver}")
    slurms_s = time.monotonic() - off_at

    with capsys.disabled():
        print(f"\na node without power: named in {ours_s:.1f} s, by Slurm in {slurms_s:.1f} s")
    assert ours_s < slurms_s
    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.redone() <= 1


def test_the_batch_host_with_rank_0_is_like_any_other_node(
    cluster: Cluster, undisturbed: Outcome
) -> None:
    job = cluster.submit()
    job.until_held()

    cluster.lab.power_off(job.node(0))
    outcome = job.finish()

    assert_as_if_undisturbed(outcome, undisturbed, KIND)


@pytest.mark.full
def test_a_node_that_was_cut_off_is_refused_when_it_comes_back(
    cluster: Cluster, undisturbed: Outcome
) -> None:
    lab = cluster.lab
    job = cluster.submit()
    job.until_held()
    leaver = job.node(1)

    lab.cut(leaver)
    job.until_lost(leaver)
    assert lab.strays(leaver), "what runs on a node that is cut off goes on"
    job.go_on()
    job.until(lambda status: status.epoch == 2, "a recovery")
    lab.heal(leaver)
    lab.wait(lambda: not lab.strays(leaver), 60, f"nothing of the job on {leaver}")
    outcome = job.finish()

    assert leaver not in {slot.node for slot in outcome.status.slots}
    assert_as_if_undisturbed(outcome, undisturbed, KIND)


@pytest.mark.full
def test_a_node_that_hangs_is_lost_and_cleaned_when_it_goes_on(
    cluster: Cluster, undisturbed: Outcome
) -> None:
    lab = cluster.lab
    job = cluster.submit()
    job.until_held()
    leaver = job.node(3)

    lab.hang(leaver)
    job.until_lost(leaver)
    job.go_on()
    job.until(lambda status: status.epoch == 2, "a recovery")
    lab.thaw(leaver)
    lab.wait(lambda: not lab.strays(leaver), 60, f"nothing of the job on {leaver}")

    assert_as_if_undisturbed(job.finish(), undisturbed, KIND)


@pytest.mark.full
def test_a_node_whose_slurmd_is_dead_is_left_without_losing_a_step(
    cluster: Cluster, undisturbed: Outcome, lab: Lab
) -> None:
    job = cluster.submit()
    job.until_held()
    leaver = job.node(2)

    lab.kill_slurmd(leaver)
    job.until_armed()
    job.go_on()
    job.until(lambda status: status.epoch == 2 and status.phase == "training", "the move's end")
    outcome = job.finish()

    assert leaver not in {slot.node for slot in outcome.status.slots}
    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.redone() == 0


@pytest.mark.full
def test_a_job_outlives_all_nodes_that_it_was_submitted_with(cluster: Cluster, lab: Lab) -> None:
    job = cluster.submit("--nodes=2", standby=2)
    job.until_held()
    first = [slot.node for slot in job.status().slots]
    for node in reversed(first):
        job.until(lambda status: "warm" in {one.state for one in status.standbys}, "a warm standby")
        lab.power_off(node)
        job.until_lost(node)
        job.until(lambda s, n=node: n not in {one.node for one in s.slots}, f"one for {node}")  # type: ignore[misc]

    lab.wait(lambda: job.id not in {one.id for one in lab.squeue()}, 90, "Slurm gives the job up")
    job.go_on()
    outcome = job.finish()

    assert (outcome.status.code, outcome.status.outcome) == (0, "done"), job.logs()
    assert not {slot.node for slot in outcome.status.slots} & {*first}
