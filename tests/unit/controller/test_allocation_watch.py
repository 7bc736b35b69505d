"""What becomes of a job's allocation, and what that means for the job."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest

from support.jobs import Story, expired
from support.schedulers import ScriptedAllocations, ScriptedScheduler
from tmover.controller.presence import Presence, Who
from tmover.controller.watch import AllocationWatch, Watch, lives_elsewhere, verdict
from tmover.core.events import (
    CANCELLED,
    REQUEUE,
    AnyEvent,
    CancelRequested,
    MoveRequested,
    StandbysGone,
    Submitted,
)
from tmover.core.job import Job
from tmover.errors import ConfigError, SchedulerError, SlurmUnreachable
from tmover.scheduler.interface import Allocation, Fate, NodeInfo, NodeState

FORMED = Story(nnodes=2, standbys=0, allocated=True).training().job
AWAY = SlurmUnreachable("slurmctld is away")


def found(fate: Fate, at: float = 1.0, job: str = "j") -> Allocation:
    return Allocation(job=job, fate=fate, text=f"Slurm says {fate.value}", at=at)


def empty() -> Job:
    """Return a job both of whose nodes are lost."""
    story = Story(nnodes=2, standbys=0, allocated=True)
    story.training()
    story.tell(expired("a0"), expired("a1"))
    assert not any(story.job.is_alive(agent) for agent in story.job.slots)
    return story.job


# --- the verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [FORMED, empty()], ids=["alive", "empty"])
@pytest.mark.parametrize("fate", [Fate.PENDING, Fate.RUNNING])
def test_an_allocation_that_is_there_ends_nothing(job: Job, fate: Fate) -> None:
    assert verdict(job, found(fate)) is None


@pytest.mark.parametrize("job", [FORMED, empty()], ids=["alive", "empty"])
def test_who_stops_the_allocation_stops_the_job(job: Job) -> None:
    assert verdict(job, found(Fate.STOPPED)) == CancelRequested(
        job="j", reason="Slurm says stopped", code=CANCELLED
    )


@pytest.mark.parametrize("job", [FORMED, empty()], ids=["alive", "empty"])
def test_a_requeued_job_ends_since_another_one_begins(job: Job) -> None:
    assert verdict(job, found(Fate.REQUEUED)) == CancelRequested(
        job="j", reason="Slurm says requeued: it begins anew", code=CANCELLED
    )


def test_ranks_that_live_elsewhere_go_on_when_the_allocation_has_ended() -> None:
    assert verdict(FORMED, found(Fate.ENDED)) is None


def test_one_rank_s_node_is_enough_to_go_on() -> None:
    story = Story(nnodes=2, standbys=0, allocated=True)
    story.training()
    story.tell(expired("a0"))

    assert verdict(story.job, found(Fate.ENDED)) is None


def test_an_allocation_that_has_ended_ends_a_job_without_nodes() -> None:
    assert verdict(empty(), found(Fate.ENDED)) == CancelRequested(
        job="j", reason="Slurm says ended, and no node is left", code=1
    )


@pytest.mark.parametrize(("missed", "ends"), [(0, False), (2, False), (3, True), (9, True)])
def test_missing_for_long_is_ended(missed: int, *, ends: bool) -> None:
    end = verdict(empty(), found(Fate.MISSING), missed=missed)

    assert (end is not None) is ends


def test_missing_ends_no_job_that_has_a_node() -> None:
    assert verdict(FORMED, found(Fate.MISSING), missed=99) is None


# --- the watch ------------------------------------------------------------------------------------


class Watched:
    """A watch over jobs, and what it has posted and begun anew. A job that is to end does."""

    def __init__(self, allocations: ScriptedAllocations, *jobs: Job) -> None:
        self.allocations = allocations
        self.jobs = {job.name: job for job in jobs}
        self.presence = Presence(lease_s=5)
        self.posted: list[AnyEvent] = []
        self.begun: list[str] = []
        self.is_ordering = False
        self.watch = AllocationWatch(
            allocations, poll_s=0.001, live=lambda: self.jobs, agents_on=self.presence.on_node,
            post=self.post, requeued=self.requeued, is_ordering=lambda _: self.is_ordering,
        )  # fmt: skip

    def post(self, event: AnyEvent) -> None:
        self.posted.append(event)
        if isinstance(event, CancelRequested):
            del self.jobs[event.job]

    def requeued(self, job: Job, name: str) -> Submitted | None:
        self.begun.append(f"{job.name} as {name}")
        return Submitted(job=name, nnodes=job.nnodes, nproc=job.nproc, owner=job.owner)

    def until(self, is_over: Callable[[], bool]) -> None:
        async def run() -> None:
            task = asyncio.ensure_future(self.watch.run())
            while not is_over():
                assert not task.done(), task.exception()
                await asyncio.sleep(0.001)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run(asyncio.wait_for(run(), timeout=30))

    def looks(self, count: int) -> None:
        until = self.allocations.looked + count
        self.until(lambda: self.allocations.looked >= until)


def test_one_poll_that_missed_a_job_counts_once_however_often_it_is_looked_at() -> None:
    watched = Watched(ScriptedAllocations([found(Fate.MISSING)]), empty())

    watched.looks(10)

    assert watched.posted == []


def test_a_job_that_three_polls_have_missed_has_ended() -> None:
    looks = [[found(Fate.MISSING, at=at)] for at in (1.0, 1.0, 2.0, 2.0, 3.0)]
    watched = Watched(ScriptedAllocations(*looks), empty())

    watched.until(lambda: bool(watched.posted))

    assert watched.allocations.looked == 5
    assert watched.posted == [
        CancelRequested(job="j", reason="Slurm says missing, and no node is left", code=1)
    ]


def test_a_job_that_is_seen_in_between_is_not_missing() -> None:
    fates = [Fate.MISSING, Fate.MISSING, Fate.RUNNING, Fate.MISSING, Fate.MISSING]
    looks = [[found(fate, at=float(at))] for at, fate in enumerate(fates)]
    watched = Watched(ScriptedAllocations(*looks), empty())

    watched.looks(10)

    assert not any(isinstance(event, CancelRequested) for event in watched.posted)


def test_a_standby_that_is_gone_before_it_has_joined_is_ordered_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks = [[found(Fate.RUNNING, at=float(at))] for at in range(4)]
    watched = Watched(ScriptedAllocations(*looks), empty())

    watched.looks(10)

    assert watched.posted == [StandbysGone(job="j", epoch=1)]
    assert "a standby of job j is gone before it has joined: it is ordered anew" in caplog.text


def test_a_slurm_that_does_not_answer_concludes_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    running = [found(Fate.RUNNING)]
    watched = Watched(ScriptedAllocations(AWAY, AWAY, AWAY, running), empty())

    watched.looks(6)

    assert watched.posted == []
    assert [record.getMessage() for record in caplog.records] == [
        "Slurm did not answer, nothing is concluded: slurmctld is away",
        "Slurm answers again",
    ]
    assert watched.watch.seen("j") == found(Fate.RUNNING)


def test_an_error_of_our_own_is_logged_once_and_ends_no_controller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = ZeroDivisionError("ours")
    watched = Watched(ScriptedAllocations(ours, ours, [found(Fate.RUNNING)]), empty())

    watched.looks(5)

    assert caplog.text.count("could not take in what Slurm said") == 1
    assert watched.watch.seen("j") == found(Fate.RUNNING)


def test_without_a_job_in_an_allocation_slurm_is_not_asked() -> None:
    watched = Watched(ScriptedAllocations([found(Fate.RUNNING)]), FORMED)
    job = watched.jobs.pop("j")
    looked: list[int] = []

    def comes() -> bool:
        looked.append(watched.allocations.looked)
        if len(looked) == 10:
            watched.jobs["j"] = job
        return watched.allocations.looked > 0

    watched.until(comes)

    assert looked[:10] == [0] * 10


def test_a_requeued_job_begins_anew_and_then_the_old_one_ends() -> None:
    allocations = ScriptedAllocations([found(Fate.REQUEUED)])
    allocations.successors = ["slurm1r1"]
    watched = Watched(allocations, FORMED)

    watched.until(lambda: not watched.jobs)

    assert watched.begun == ["j as slurm1r1"]
    assert [type(event) for event in watched.posted] == [Submitted, CancelRequested]
    assert threading.main_thread() not in allocations.threads  # it may ask Slurm for seconds


def test_a_job_that_has_ended_to_be_requeued_begins_anew_and_is_ended_no_more() -> None:
    story = Story(nnodes=2, standbys=0, allocated=True).training()
    story.tell(CancelRequested(job="j", reason="no node came", code=REQUEUE))
    allocations = ScriptedAllocations([found(Fate.ENDED)], [found(Fate.REQUEUED)])
    allocations.successors = ["slurm1r1"]
    watched = Watched(allocations, story.job)

    watched.until(lambda: len(watched.posted) > 0)

    assert {*watched.begun} == {"j as slurm1r1"}
    assert {type(event) for event in watched.posted} == {Submitted}


@pytest.mark.parametrize("error", [SchedulerError("full"), ConfigError("full"), OSError("full")])
def test_a_job_that_cannot_begin_anew_does_not_end_and_harms_no_other(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    looks = [found(Fate.REQUEUED), found(Fate.STOPPED, job="k")]
    allocations = ScriptedAllocations(looks)
    allocations.successors = [error, error, error, "slurm1r1"]
    watched = Watched(allocations, FORMED, dataclasses.replace(FORMED, name="k"))

    watched.until(lambda: not watched.jobs)

    assert [event.job for event in watched.posted] == ["k", "slurm1r1", "j"]
    assert watched.begun == ["j as slurm1r1"]
    assert caplog.text.count("job j cannot begin anew: full") == 1


def held(*nodes: str) -> Allocation:
    """Return what is found of a job that was requeued, and whose standbys hold these nodes."""
    return msgspec.structs.replace(found(Fate.REQUEUED), standby_nodes=nodes)


SEATS = [FORMED.agents[name].node for name in FORMED.slots]


@pytest.mark.parametrize(
    ("job", "nodes", "lives"),
    [
        (FORMED, (*SEATS, "spare"), True),
        (FORMED, SEATS[:1], False),
        (FORMED, ("spare",), False),
        (empty(), SEATS, False),
        (Story(nnodes=2, standbys=0, allocated=True).joined().job, SEATS, False),
    ],
    ids=["all", "some", "none", "vacant", "starts afresh"],
)
def test_a_job_lives_elsewhere_only_if_all_its_slots_do(
    job: Job, nodes: Sequence[str], *, lives: bool
) -> None:
    assert lives_elsewhere(job, held(*nodes)) is lives


def test_a_job_that_lives_on_standbys_outlives_the_requeue_of_what_it_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    allocations = ScriptedAllocations([held(*SEATS)])
    allocations.forsaking = [AWAY, None]
    watched = Watched(allocations, FORMED)

    watched.looks(5)

    assert (watched.posted, watched.begun) == ([], [])
    assert {*allocations.forsaken} == {"j"}
    assert caplog.text.count("slurmctld is away, asking again") == 1
    assert threading.main_thread() not in allocations.threads  # it may ask Slurm for seconds


# --- nodes ----------------------------------------------------------------------------------------


def test_a_node_of_slurm_and_one_of_the_local_scheduler_may_have_the_same_name() -> None:
    drained = NodeInfo(name="node1", address="", state=NodeState.DRAINING, reason="hot")
    allocations = ScriptedAllocations([found(Fate.RUNNING)])
    watched = Watched(allocations, FORMED)
    local: list[AnyEvent] = []
    for who in (Who("j", "node1-aa"), Who("7", "node1-bb")):
        watched.presence.join(who, "node1", b"r", now=0)
    local_watch = Watch(
        ScriptedScheduler(), poll_s=1.0, post=local.append,
        agents_on=lambda node: [w for w in watched.presence.on_node(node) if w.job == "7"],
    )  # fmt: skip

    watched.looks(2)
    assert watched.posted == []
    allocations.shown = [drained]
    watched.looks(3)

    assert watched.posted == [MoveRequested(job="j", node="node1", reason="hot")]
    assert local_watch.events([drained]) == [MoveRequested(job="7", node="node1", reason="hot")]
