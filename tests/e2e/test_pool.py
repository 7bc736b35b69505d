"""Jobs that share standbys: one job's goes to another that needs it, and is warm there, too."""

from __future__ import annotations

import pathlib

import psutil
import pytest

from e2e.conftest import Twin
from support.eventually import eventually
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.wire import JobStatus, ReadyRequest

THREE = Kind(nodes=3)
SETTLED = 1
"""Loans after which a standby holds all it ever needs."""
LOANS = 8
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


@pytest.mark.full
def test_a_node_is_left_for_one_that_is_lent_by_a_job_with_two_ranks_per_node(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = Kind(nodes=2, nproc=2, steps=40)
    lender = Training(cluster, kind, hold_at=5, pool="p", name="lender")
    lender.until_held()
    lent = lender.until(is_warm).standbys[0].node
    borrower = Training(cluster, kind, standby=0, hold_at=5, pool="p", name="borrower")
    borrower.until_held()

    cluster.move(borrower.job, borrower.node_of(0))
    borrower.until(lambda s: s.move is not None and s.move.phase == "armed")
    borrower.open_gate()
    found = borrower.finish()

    assert_as_if_undisturbed(found, undisturbed(kind), kind)
    assert found.redone() == 0
    assert found.status.slots[0].node == lent
    assert len(found.events("lent")) == kind.nproc
    lender.open_gate()
    assert_as_if_undisturbed(lender.finish(), undisturbed(kind), kind)


@pytest.mark.full
def test_in_another_environment_the_processes_of_a_lent_standby_are_started_afresh(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    lender = Training(cluster, THREE, hold_at=5, pool="p", name="lender")
    lender.until_held()
    lent = lender.until(is_warm).standbys[0].node
    other = {"OMP_NUM_THREADS": "1", "READ_BY_A_LIBRARY": "once"}
    borrower = Training(
        cluster, THREE, standby=0, hold_at=5, pool="p", inject=LOSE, name="borrower", settings=other
    )
    borrower.until_held()

    borrower.open_gate()
    found = borrower.finish()

    assert_as_if_undisturbed(found, undisturbed(THREE), THREE)
    assert lent in {slot.node for slot in found.status.slots}
    assert found.events("lent") == []


@pytest.mark.full
def test_a_controller_that_dies_while_a_standby_is_lent_goes_on_with_it(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    lender = Training(cluster, THREE, hold_at=5, pool="p", name="lender")
    lender.until_held()
    lent = lender.until(is_warm).standbys[0].node
    borrower = Training(cluster, THREE, standby=0, hold_at=5, pool="p", name="borrower")
    borrower.until_held()

    cluster.move(borrower.job, borrower.node_of(1))
    lender.until(lambda s: not s.standbys)
    cluster.kill_controller()
    cluster.ensure_controller()
    borrower.until(lambda s: s.move is not None and s.move.phase == "armed")
    borrower.open_gate()
    found = borrower.finish()

    assert_as_if_undisturbed(found, undisturbed(THREE), THREE)
    assert found.status.slots[1].node == lent
    assert found.redone() == 0


@pytest.mark.full
def test_a_lent_standby_that_dies_on_its_way_costs_the_lender_nothing(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    lender = Training(cluster, THREE, hold_at=5, pool="p", name="lender")
    lender.until_held()
    lent = lender.until(is_warm).standbys[0].node
    borrower = Training(cluster, THREE, standby=0, hold_at=5, pool="p", name="borrower")
    borrower.until_held()

    cluster.move(borrower.job, borrower.node_of(1))
    lender.until(lambda s: not s.standbys)
    cluster.fail_node(lent)
    lender.open_gate()
    borrower.open_gate()

    assert_as_if_undisturbed(lender.finish(), undisturbed(THREE), THREE)
    found = borrower.finish()
    assert_as_if_undisturbed(found, undisturbed(THREE), THREE)
    assert lent not in {slot.node for slot in found.status.slots}


@pytest.mark.full
def test_a_standby_that_is_lent_to_and_fro_stays_as_large_as_it_was(
    cluster: LocalCluster, tmp_path: pathlib.Path
) -> None:
    kind = Kind(nodes=2, steps=1_000_000)
    gate = tmp_path / "gate"
    holds = f"hold:sandbox=1,step=0,point=step_open,until={gate}"
    jobs = [
        Training(cluster, kind, standby=count, pool="p", inject=holds, name=f"job{count}")
        for count in (1, 0)
    ]
    gate.touch()
    lent = jobs[0].until(is_warm).standbys[0].node
    process = psutil.Process(jobs[0].worker(lent).pid)
    held: tuple[int, int] | None = None
    memory = 0
    for number in range(LOANS):
        before, after = jobs[number % 2], jobs[1 - number % 2]
        after.until(lambda status: status.phase == "training")
        gate.unlink()
        asked = after.node_of(0)
        cluster.move(after.job, asked)
        after.until(lambda status: [s.node for s in status.standbys] == [lent])
        cluster.ask(ReadyRequest(job=after.job, node=asked))
        gate.touch()
        after.until(lambda status: is_warm(status) and status.standbys[0].takes == (0, 1))
        assert before.until(lambda status: not status.standbys).epoch == 1
        if number == SETTLED:
            held = process.num_fds(), process.num_threads()
            memory = process.memory_info().rss

    eventually(lambda: (process.num_fds(), process.num_threads()) == held)
    assert process.memory_info().rss <= memory * 1.05
