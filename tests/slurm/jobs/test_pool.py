"""Two jobs of one user on Slurm that share a standby."""

from __future__ import annotations

import pytest

from support.lab import Lab
from support.slurmjobs import HELD, KIND, Cluster, weigh
from support.training import Outcome, assert_as_if_undisturbed

pytestmark = pytest.mark.timeout(600)
LATER = 30


def test_a_standby_goes_from_one_job_to_another_and_belongs_to_it_in_slurm(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    lender = cluster.submit("--pool", "p", "--exclusive", nodes=1)
    lent = lender.until_held().standbys[0].node
    trace = cluster.home / "trace2"
    cluster.env["TMOVER_TRACE"] = str(trace)
    cluster.hold_at(LATER)
    borrower = cluster.submit("--pool", "p", "--exclusive", standby=0)
    borrower.until(lambda status: status.step == LATER, f"step {LATER}")
    leaver = borrower.node(2)

    cluster.tmover("migrate", leaver, "--job", borrower.id, "--no-wait")
    borrower.until_armed()
    held = [one for one in borrower.status().allocations if one.endswith(f"on {lent}")]
    said = cluster.tmover("status", borrower.id).stdout
    borrower.go_on(LATER)
    status = borrower.until(lambda status: status.code is not None, "the end")
    lender.until(lambda status: lent not in status.nodes, "its standby gone")
    lender.go_on(HELD)
    after = lender.until(lambda status: status.code is not None, "the lender's end")
    lab.wait(lambda: not lab.squeue(), 60, "an empty squeue")

    outcome = weigh(trace, status)
    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.redone() == 0
    assert status.slots[2].node == lent
    assert len(held) == 1, "Slurm's job of the standby is not the borrower's"
    assert f"pool p: standbys are shared with other jobs: slurm{lender.id}" in said
    assert after.code == 0
    assert len(outcome.events("lent")) == 1
