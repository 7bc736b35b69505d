"""Jobs that share standbys: one job's goes to another that needs it, and is warm there, too."""

from __future__ import annotations

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.wire import JobStatus

THREE = Kind(nodes=3)
LOSE = "killnode:node=node6-,step=7,point=in_vote"


def is_warm(status: JobStatus) -> bool:
    return status.phase == "training" and [s.state for s in status.standbys] == ["warm"]


def test_a_job_without_a_standby_is_lent_one_by_another_job_of_its_pool(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    lender = Training(cluster, THREE, hold_at=5, pool="p", refill=True, name="lender")
    lender.until_held()
    before = lender.until(is_warm).standbys[0].node
    borrower = Training(
        cluster, THREE, standby=0, hold_at=5, pool="p", inject=LOSE, name="borrower"
    )
    borrower.until_held()

    borrower.open_gate()
    found = borrower.finish()

    assert_as_if_undisturbed(found, undisturbed(THREE), THREE)
    assert before in {slot.node for slot in found.status.slots}
    assert [line["job"] for line in found.events("lent")] == [borrower.job]
    assert [each.path for each in found.status.incidents[-1].handings] == ["lent"]
    after = lender.until(lambda s: is_warm(s) and s.standbys[0].node != before)
    assert f"{before} is lent to job {borrower.job}" in "\n".join(after.notes)
    lender.open_gate()
    assert_as_if_undisturbed(lender.finish(), undisturbed(THREE), THREE)
