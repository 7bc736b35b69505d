"""How jobs on Slurm end: by themselves, by anybody's wish, by a limit; and how they begin anew."""

from __future__ import annotations

import re
import subprocess
import time

import pytest

from support.lab import Lab
from support.slurmjobs import HELD, KIND, Cluster, Job
from support.training import Outcome, assert_as_if_undisturbed

pytestmark = pytest.mark.timeout(600)


def accounted(lab: Lab, job: Job) -> dict[str, str]:
    """Return what Slurm's accounting shows of a job that has ended."""
    line = lab.run("sacct", "-c", "-n", "-P", "-j", job.id, "-o", "jobid,state,exitcode").stdout
    fields = line.split("\n", 1)[0].split("|")
    return dict(zip(("id", "state", "code"), fields, strict=False))


def shown(lab: Lab, job: Job, key: str) -> str:
    """Return a field of `scontrol show job`."""
    text = lab.run("scontrol", "-o", "show", "job", job.id).stdout
    return next((word.partition("=")[2] for word in text.split() if word.startswith(f"{key}=")), "")


@pytest.mark.full
def test_slurm_shows_the_true_end_of_a_job_that_lost_a_node(
    cluster: Cluster, lab: Lab, undisturbed: Outcome
) -> None:
    job = cluster.submit()
    job.until_held()
    leaver = job.node(3)

    lab.power_off(leaver)
    job.until_lost(leaver)
    job.go_on()
    outcome = job.finish()

    assert (shown(lab, job, "JobState"), shown(lab, job, "ExitCode")) == ("COMPLETED", "0:0")
    assert_as_if_undisturbed(outcome, undisturbed, KIND)


def test_a_signal_saves_a_checkpoint_and_scancel_ends_everything_within_seconds(
    cluster: Cluster, lab: Lab
) -> None:
    job = cluster.submit(nodes=2, arguments=("--steps", "100000", "--checkpoint", "saved.pt"))
    status = job.until_held()

    lab.run("scancel", "--signal=USR1", job.id)  # as Slurm does before a time limit
    job.go_on()
    lab.wait((cluster.home / "saved.pt").exists, 60, "the checkpoint")
    began = time.monotonic()

    lab.run("scancel", job.id)
    ended = job.until(lambda status: status.code is not None, "the end")
    lab.wait(lambda: not lab.squeue(), 60, "an empty squeue")
    took_s = time.monotonic() - began

    print(f"all of job {job.id} had ended {took_s:.1f} s after scancel")
    assert (ended.code, ended.outcome) == (130, f"Slurm job {job.id} was cancelled")
    for node in {*(slot.node for slot in status.slots), *(s.node for s in status.standbys)}:
        lab.wait(lambda n=node: not lab.strays(n), 30, f"nothing on {node}")  # type: ignore[misc]


def test_tmover_cancel_ends_a_pending_job(cluster: Cluster, lab: Lab) -> None:
    lab.run("sbatch", "-N6", "--exclusive", "--wrap", "sleep 600")
    lab.wait(lambda: [one.state for one in lab.squeue()] == ["RUNNING"], 30, "a full cluster")
    job = cluster.submit("--exclusive")
    assert job.status().phase == "forming"

    said = cluster.tmover("cancel", job.id).stdout

    assert "the job ends: cancelled by hand" in said
    lab.wait(lambda: job.id not in {one.id for one in lab.squeue()}, 30, "the job's end")


def test_a_standby_that_is_cancelled_while_it_waits_is_ordered_anew(
    cluster: Cluster, lab: Lab
) -> None:
    lab.run("sbatch", "-N2", "-w", "node5,node6", "--exclusive", "--wrap", "exec sleep 600")
    lab.wait(lambda: [one.state for one in lab.squeue()] == ["RUNNING"], 30, "two nodes are taken")
    cluster.submit("--exclusive")

    def waiting() -> list[str]:
        return [one.id for one in lab.squeue() if one.state == "PENDING"]

    first = lab.wait(waiting, 60, "a standby that waits")
    lab.run("scancel", *first)
    again = lab.wait(lambda: set(waiting()) - {*first}, 60, "another one")

    assert (len(first), len(again)) == (1, 1)


def test_a_script_that_fails_gives_its_exit_code_to_slurm(cluster: Cluster, lab: Lab) -> None:
    script = cluster.home / "fails.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --output=%x.%j.log\n"
        "srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log tmover run fails.py &\n"
        "exec tmover wait --srun $!\n"
    )
    (cluster.home / "fails.py").write_text("import tmover\ntmover.init()\nraise SystemExit(7)\n")

    said = cluster.tmover("submit", "fails.sbatch", "--nodes=2").stdout
    job = Job(cluster, said.split()[1])
    status = job.until(lambda status: status.code is not None, "the end")
    lab.wait(lambda: not lab.squeue(), 60, "an empty squeue")

    assert status.code == 7, job.logs()
    assert (shown(lab, job, "JobState"), shown(lab, job, "ExitCode")) == ("FAILED", "7:0")


def test_a_script_that_fails_before_tmover_run_ends_the_job(cluster: Cluster, lab: Lab) -> None:
    script = cluster.home / "early.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --output=%x.%j.log\nexit 3\n"
        "srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log tmover run nothing.py\n"
    )

    said = cluster.tmover("submit", "early.sbatch", "--nodes=2").stdout
    job = Job(cluster, said.split()[1])
    status = job.until(lambda status: status.code is not None, "the end")

    assert status.code == 1
    assert status.outcome == f"Slurm job {job.id} has ended (FAILED), and no node is left"
    assert not lab.squeue()


@pytest.mark.parametrize("to_the_end", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_requeued_job_is_another_one_for_us(
    cluster: Cluster, lab: Lab, *, to_the_end: bool
) -> None:
    job = cluster.submit(nodes=2)
    job.until_held()
    standby = {one.id for one in lab.squeue()} - {job.id}

    lab.run("scontrol", "requeue", job.id)
    ended = Job(cluster, f"slurm{job.id}").until(lambda s: s.code is not None, "the first's end")
    again = Job(cluster, f"slurm{job.id}r1")
    lab.wait(lambda: cluster.knows(again.id), 30, "the next incarnation")
    lab.wait(lambda: not standby & {one.id for one in lab.squeue()}, 60, "the standby's end")
    assert ended.outcome == f"Slurm has requeued job {job.id}: it begins anew"
    assert job.status().job == again.id
    if to_the_end:
        lab.run("scontrol", "update", f"JobId={job.id}", "StartTime=now")
        again.go_on()
        outcome = again.finish()
        assert outcome.status.code == 0, outcome.status
    else:
        cluster.tmover("cancel", job.id)
        lab.wait(lambda: not lab.squeue(), 60, "an empty squeue")


@pytest.mark.full
def test_a_job_near_its_time_limit_saves_a_checkpoint_and_ends(cluster: Cluster, lab: Lab) -> None:
    cluster.hold_at(HELD)
    job = cluster.submit(
        "--signal=USR1@60", nodes=2, standby=0,
        arguments=("--steps", "100000", "--checkpoint", "saved.pt"),
    )  # fmt: skip
    job.until(lambda status: status.step == HELD, "some steps")
    assert not (cluster.home / "saved.pt").exists()

    # Slurm looks at limits once a minute: the limit is made to be near, then it is passed
    lab.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    job.go_on()
    lab.wait((cluster.home / "saved.pt").exists, 120, "the checkpoint")
    ended = job.until(lambda status: status.code is not None, "the end")
    lab.wait(lambda: not lab.squeue(), 60, "an empty squeue")

    assert ended.outcome == f"Slurm job {job.id} has reached its time limit"


def test_a_standby_that_finds_no_node_is_waited_for_in_the_queue(
    cluster: Cluster, lab: Lab
) -> None:
    lab.run("sbatch", "-w", "node6", "--exclusive", "--wrap", "exec sleep 600")
    lab.wait(lambda: [one.state for one in lab.squeue()] == ["RUNNING"], 30, "one node is taken")
    job = cluster.submit("--exclusive", nodes=5)

    status = job.until(
        lambda status: any("PENDING (" in held for held in status.allocations[1:]),
        "a pending order",
    )
    shown = cluster.tmover("status", job.id).stdout
    cluster.tmover("cancel", job.id)

    assert status.allocations[0].startswith(f"Slurm job {job.id} RUNNING on node[1-5]")
    assert re.search(r"standby job \d+ PENDING \((Resources|Priority)\)", shown), shown
    assert re.search(r"Slurm is asked \d+ RPCs per minute", shown), shown
    lab.wait(lambda: len(lab.squeue()) == 1, 60, "nothing of the job in squeue")


def test_users_are_told_in_one_line(cluster: Cluster, lab: Lab) -> None:
    script = cluster.home / "plain.sbatch"
    script.write_text("#!/bin/bash\nsrun torchrun --nproc-per-node 1 train.py\n")

    def says(*argv: str) -> tuple[int, str]:
        ended: subprocess.CompletedProcess[str] = cluster.tmover("submit", *argv, check=False)
        return ended.returncode, ended.stderr

    unready, reservation = says("plain.sbatch", "--nodes=2"), says(
        "examples/train_gpt.sbatch", "--reservation=none"
    )  # fmt: skip

    assert unready[0] == 2
    assert "tmover run" in unready[1]
    assert reservation[0] == 3
    assert reservation[1].count("\n") == 1
    assert "reservation" in reservation[1]
    assert not lab.squeue()
