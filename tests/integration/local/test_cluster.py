"""Jobs on a cluster whose controller and nodes are real and were forked."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from collections.abc import Callable

import pytest

from support.eventually import eventually
from support.forkserver import ForkServer
from tmover.cluster import JobSpec, LocalCluster
from tmover.config import Config, load
from tmover.errors import SchedulerError
from tmover.process import is_alive, send_signal
from tmover.scheduler.interface import NodeState
from tmover.wire import JobStatus

FOREVER = "1000000"
NOTHING = "print('hello')"

MakeSpec = Callable[..., JobSpec]


def has_ended(status: JobStatus) -> bool:
    return status.code is not None


def trains(status: JobStatus) -> bool:
    return status.phase == "training" and status.step is not None and status.step > 2


def is_warm(status: JobStatus) -> bool:
    return trains(status) and any(standby.state == "warm" for standby in status.standbys)


def nodes(status: JobStatus) -> list[str]:
    return [slot.node for slot in status.slots]


def test_a_job_ends_well(cluster: LocalCluster, spec: MakeSpec) -> None:
    job = cluster.submit(spec(text=NOTHING, nodes=2, nproc=2))

    status = cluster.wait(job, has_ended, timeout_s=60)

    assert (status.code, status.outcome) == (0, "done")
    assert nodes(status) == ["node1", "node2"]
    eventually(lambda: not cluster.scheduler.running(job))
    for node in nodes(status):
        assert (cluster.logs(job) / f"{node}.log").read_text().count("hello") == 2


def test_a_job_trains_and_ends(cluster: LocalCluster, spec: MakeSpec) -> None:
    job = cluster.submit(spec("20"))

    status = cluster.wait(job, has_ended, timeout_s=60)

    assert (status.code, status.outcome) == (0, "done")
    log = (cluster.logs(job) / "node1.log").read_text()
    assert re.findall("committed .*", log) == [f"committed {step}" for step in range(20)]


def test_at_its_end_nothing_is_left(
    fork_server: ForkServer, tmp_path: pathlib.Path, spec: MakeSpec
) -> None:
    with LocalCluster(
        tmp_path / "state", Config(), start=fork_server.start_controller, spawn=fork_server.spawn
    ) as cluster:
        job = cluster.submit(spec(FOREVER, standby=1))
        cluster.wait(job, trains, timeout_s=60)
        controller = cluster.controller()
        assert controller is not None

    assert not is_alive(controller)
    assert {node.state for node in cluster.scheduler.nodes()} == {NodeState.IDLE}


def test_a_failed_node_is_replaced(cluster: LocalCluster, spec: MakeSpec) -> None:
    job = cluster.submit(spec(FOREVER, standby=1))
    cluster.wait(job, is_warm, timeout_s=60)

    cluster.fail_node("node2")

    status = cluster.wait(
        job, lambda status: trains(status) and "node3" in nodes(status), timeout_s=60
    )
    assert nodes(status) == ["node1", "node3"]


@pytest.mark.parametrize("kill", [LocalCluster.kill_agent, LocalCluster.kill_worker])
def test_what_is_killed_is_replaced(
    cluster: LocalCluster, spec: MakeSpec, kill: Callable[[LocalCluster, str], float]
) -> None:
    job = cluster.submit(spec(FOREVER, standby=1))
    cluster.wait(job, is_warm, timeout_s=60)

    kill(cluster, "node1")

    cluster.wait(
        job, lambda status: trains(status) and nodes(status) == ["node3", "node2"], timeout_s=60
    )


def test_a_standby_that_is_told_to_end_is_no_standby_any_more(
    cluster: LocalCluster, spec: MakeSpec
) -> None:
    job = cluster.submit(spec(FOREVER, standby=1))
    cluster.wait(job, is_warm, timeout_s=60)
    holder = cluster.scheduler.holder("node3")
    assert holder is not None

    send_signal(holder, signal.SIGTERM)  # it passes it on to the agent, as a scheduler would

    status = cluster.wait(job, lambda status: not status.standbys, timeout_s=60)
    assert "node3 has left: " in status.notes[-1]
    assert not any("afresh" in note or "lost" in note for note in status.notes)


def test_a_job_does_not_notice_that_its_controller_is_replaced(
    cluster: LocalCluster, spec: MakeSpec
) -> None:
    job = cluster.submit(spec(FOREVER))
    before = cluster.wait(job, trains, timeout_s=60)
    assert before.step is not None
    reached = before.step

    cluster.kill_controller()
    cluster.ensure_controller()

    status = cluster.wait(
        job, lambda status: trains(status) and (status.step or 0) > reached, timeout_s=60
    )
    assert status.epoch == before.epoch


def test_two_jobs_share_a_controller_and_no_node(
    cluster: LocalCluster, fork_server: ForkServer, spec: MakeSpec
) -> None:
    with LocalCluster(
        cluster.state, Config(), start=fork_server.start_controller, spawn=fork_server.spawn
    ) as other:
        jobs = [one.submit(spec(text=NOTHING, nodes=1)) for one in (cluster, other)]
        statuses = [cluster.wait(job, has_ended, timeout_s=60) for job in jobs]

    assert sorted(jobs) == ["1", "2"]
    assert sorted(node for status in statuses for node in nodes(status)) == ["node1", "node2"]
    assert cluster.controller() is None  # the last one to go has ended it


def test_a_controller_that_others_need_is_left_running(
    cluster: LocalCluster, fork_server: ForkServer, spec: MakeSpec
) -> None:
    job = cluster.submit(spec(FOREVER, nodes=1))
    with LocalCluster(
        cluster.state, Config(), start=fork_server.start_controller, spawn=fork_server.spawn
    ) as other:
        other.wait(other.submit(spec(text=NOTHING, nodes=1)), has_ended, timeout_s=60)

    assert cluster.controller() is not None
    cluster.wait(job, trains, timeout_s=60)


def test_a_job_for_which_there_are_no_nodes_is_refused(
    cluster: LocalCluster, spec: MakeSpec
) -> None:
    with pytest.raises(SchedulerError, match="64 free nodes, 65 are needed"):
        cluster.submit(spec(nodes=65))

    assert cluster.controller() is None  # nobody was asked to look after a job
    assert cluster.scheduler.nodes() == []


def test_waiting_for_what_does_not_come_says_what_was_seen(
    cluster: LocalCluster, spec: MakeSpec
) -> None:
    job = cluster.submit(spec(text=NOTHING, nodes=1))

    with pytest.raises(SchedulerError, match=r"did not come .* in 0 s: JobStatus"):
        cluster.wait(job, has_ended, timeout_s=0)
    cluster.wait(job, has_ended, timeout_s=60)
    with pytest.raises(SchedulerError, match="ended while something else was waited for"):
        cluster.wait(job, lambda status: False, timeout_s=60)


def test_a_controller_that_cannot_start_says_why(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMOVER_CONTROLLER_BIND", "tcp://127.0.0.1:notaport")

    with pytest.raises(Exception, match=r"the controller did not start: .*notaport"):
        cluster.ensure_controller()


def test_an_interrupt_while_the_controller_starts_does_not_lose_it(
    fork_server: ForkServer, tmp_path: pathlib.Path
) -> None:
    def start(state: pathlib.Path, log: pathlib.Path) -> int:
        pid = fork_server.start_controller(state, log)
        os.kill(os.getpid(), signal.SIGINT)
        return pid

    with LocalCluster(
        tmp_path / "state", Config(), start=start, spawn=fork_server.spawn
    ) as cluster:
        with pytest.raises(KeyboardInterrupt):
            cluster.ensure_controller()
        started = cluster.controller()

    assert started is not None  # it was waited for, so that it is on record and was ended
    assert not is_alive(started)


def test_a_controller_that_does_not_answer_is_left_to_whom_it_may_serve(
    cluster: LocalCluster, fork_server: ForkServer
) -> None:
    config = load(environ={"TMOVER_CONTROLLER_REQUEST_S": "0.2"})
    start, spawn = fork_server.start_controller, fork_server.spawn
    with LocalCluster(cluster.state, config, start=start, spawn=spawn) as other:
        other.ensure_controller()
        silent = other.controller()
        assert silent is not None
        send_signal(silent, signal.SIGSTOP)

    assert is_alive(silent)
    send_signal(silent, signal.SIGCONT)


def test_a_person_s_controller_is_not_ended(
    cluster: LocalCluster, fork_server: ForkServer, spec: MakeSpec
) -> None:
    log = cluster.state / "by-hand.log"
    fork_server.start_controller(cluster.state, log)
    by_hand = eventually(cluster.controller)
    assert by_hand is not None

    cluster.wait(cluster.submit(spec(text=NOTHING, nodes=1)), has_ended, timeout_s=60)
    cluster.close()

    assert is_alive(by_hand)
    send_signal(by_hand, signal.SIGTERM)
    eventually(lambda: not is_alive(by_hand))
