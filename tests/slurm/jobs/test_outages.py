"""Training needs neither slurmctld nor our controller."""

from __future__ import annotations

import pytest

from support.lab import Lab
from support.slurmjobs import HELD, KIND, Cluster
from support.training import Outcome, assert_as_if_undisturbed

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.full)])
def test_slurmctld_may_be_away(
    cluster: Cluster, lab: Lab, undisturbed: Outcome, *, kill: bool
) -> None:
    job = cluster.submit()
    job.until_held()

    lab.stop_slurmctld(kill=kill)
    job.go_on()
    status = job.until(lambda status: (status.step or 0) > HELD + 20, "twenty steps more")
    lab.start_slurmctld()
    outcome = job.finish()

    assert status.epoch == 1
    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.redone() == 0


@pytest.mark.full
def test_a_node_is_replaced_while_slurmctld_is_away(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    job = cluster.submit()
    job.until_held()

    lab.stop_slurmctld()
    leaver = job.node(1)
    lab.power_off(leaver)
    job.until_lost(leaver)
    job.go_on()
    job.until(lambda status: status.epoch == 2, "a recovery")
    lab.start_slurmctld()

    assert_as_if_undisturbed(job.finish(), undisturbed, KIND)


def test_the_controller_may_die_and_be_started_again(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    job = cluster.submit()
    job.until_held()
    before = {one.id for one in lab.squeue()}

    cluster.kill_controller()
    cluster.start_controller()
    job.until(lambda status: status.phase == "training", "the controller's return")
    leaver = job.node(2)
    lab.power_off(leaver)
    job.until_lost(leaver)
    job.go_on()
    outcome = job.finish()

    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert len(before) == 2
