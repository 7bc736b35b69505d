"""`tmover submit`: a job is in Slurm and known to the controller, or neither of them."""

from __future__ import annotations

import json
import os
import pathlib
import signal

import pytest

from support.fake_slurm import FakeSlurm
from tmover import wire
from tmover.cli import batch
from tmover.cli.submission import submit
from tmover.cluster import LocalCluster
from tmover.config import Config, load
from tmover.controller.client import ask
from tmover.errors import ControllerUnavailable, SlurmRefused, SlurmUnreachable
from tmover.scheduler.slurm.options import Option
from tmover.scheduler.slurm.run import Command, Completed, Run

SCRIPT = """#!/bin/bash
srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log tmover run train.py
"""


@pytest.fixture
def cluster_config() -> Config:
    """A controller that does not answer is not waited for long."""
    return load(environ={"TMOVER_CONTROLLER_REQUEST_S": "2"})


@pytest.fixture
def job(cluster: LocalCluster, tmp_path: pathlib.Path) -> batch.BatchJob:
    """A job of two nodes, and a controller that runs."""
    cluster.ensure_controller()
    return describe(cluster, tmp_path, Option("nodes", "2"))


def describe(cluster: LocalCluster, where: pathlib.Path, *options: Option) -> batch.BatchJob:
    script = where / "train.sbatch"
    script.write_text(SCRIPT)
    return batch.describe(
        script, ("a b",), options, cluster.config,
        standby=1, pool="", headless=False, state=cluster.state, config=None,
    )  # fmt: skip


def known(cluster: LocalCluster) -> list[wire.JobStatus]:
    answer = ask(cluster.state, wire.StatusRequest(), 5.0)
    assert isinstance(answer, wire.StatusReply)
    return list(answer.jobs)


def living(cluster: LocalCluster) -> list[wire.JobStatus]:
    return [status for status in known(cluster) if status.code is None]


def forget(cluster: LocalCluster) -> None:
    for status in living(cluster):
        ask(cluster.state, wire.CancelRequest(job=status.job, reason="the test ends"), 5.0)


def left(slurm: FakeSlurm) -> list[str]:
    return [job.id for job in slurm.jobs.values() if job.state in ("PENDING", "RUNNING")]


def test_a_job_is_submitted_and_made_known(
    cluster: LocalCluster, job: batch.BatchJob, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm()

    submit(job, slurm, as_json=True)

    shown = json.loads(capsys.readouterr().out)
    made = slurm.jobs["1"]
    assert (shown["slurm"], shown["nodes"], shown["standby"]) == (1, 2, 1)
    assert shown["logs"].endswith("/train.sbatch.1.*.log")
    assert (made.is_no_kill, made.wanted, made.script) == (True, 2, (str(job.script), "a b"))
    assert made.env["TMOVER_STATE"] == str(cluster.state)
    assert [len(status.slots) for status in known(cluster)] == [2]
    forget(cluster)


def test_a_full_cluster_is_said_and_nothing_is_lost(
    cluster: LocalCluster, job: batch.BatchJob, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm(nodes=1)

    submit(job, slurm, as_json=False)

    assert "2 nodes: it waits for its nodes (Resources)" in capsys.readouterr().out
    assert left(slurm) == ["1"]
    forget(cluster)


def test_what_slurm_refuses_is_not_made_known(
    cluster: LocalCluster, job: batch.BatchJob, tmp_path: pathlib.Path
) -> None:
    slurm = FakeSlurm()

    with pytest.raises(SlurmRefused, match="Invalid partition name specified"):
        submit(describe(cluster, tmp_path, Option("partition", "no")), slurm, as_json=False)

    assert known(cluster) == []


def test_without_slurmctld_nothing_is_done(cluster: LocalCluster, tmp_path: pathlib.Path) -> None:
    slurm = FakeSlurm()
    slurm.is_up = False

    with pytest.raises(SlurmUnreachable, match="nothing was submitted"):
        submit(describe(cluster, tmp_path), slurm, as_json=False)

    assert cluster.controller() is None
    assert slurm.jobs == {}


def test_a_job_that_cannot_be_made_known_is_cancelled(
    cluster: LocalCluster, job: batch.BatchJob, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm()

    def run(command: Command) -> Completed:
        if command.argv[0] == "sbatch":
            cluster.kill_controller()
        return slurm(command)

    with pytest.raises(ControllerUnavailable):
        submit(job, run, as_json=False)

    assert slurm.jobs["1"].state == "CANCELLED"
    assert "job 1 is cancelled" in capsys.readouterr().err


@pytest.mark.parametrize("place", range(8))
def test_ctrl_c_leaves_both_or_neither(
    cluster: LocalCluster, job: batch.BatchJob, place: int
) -> None:
    slurm = FakeSlurm()
    count = -1

    def run(command: Command) -> Completed:
        nonlocal count
        completed = slurm(command)
        count += 1
        if count == place:
            os.kill(os.getpid(), signal.SIGINT)
        return completed

    code = end_of(job, run)

    if code == 0:
        assert count < place
        assert (left(slurm), len(known(cluster))) == (["1"], 1)
    else:
        assert (code, count >= place) == (130, True)
        assert (left(slurm), living(cluster)) == ([], [])
    forget(cluster)


def end_of(job: batch.BatchJob, run: Run) -> object:
    """Return the code with which the submission of a job ends."""
    try:
        submit(job, run, as_json=False)
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        return error.code
    return 0
