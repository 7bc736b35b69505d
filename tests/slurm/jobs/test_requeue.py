"""A job for which no node comes: it stores what it holds, and Slurm has it go on later."""

from __future__ import annotations

import pytest

from support.lab import Lab
from support.slurmjobs import HELD, ROOT, Cluster, Job
from support.training import Outcome, judge, read_trace
from tmover.core.events import REQUEUE

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

STEPS = 40
TAKEN = "node[3-6]"


def submitted(cluster: Cluster, name: str, *lines: str) -> Job:
    """Submit a script for two nodes that may leave checkpoints, with a trace of its own."""
    script = cluster.home / f"{name}.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --output=%x.%j.log --open-mode=append\n"
        + "".join(f"{line}\n" for line in lines)
        + "srun --no-kill --kill-on-bad-exit=0 --open-mode=append --output=%x.%j.%N.log "
        f"tmover run {ROOT}/tests/e2e/train_small.py --steps {STEPS} "
        f"--checkpoint {cluster.home / name} 1000 &\n"
        "exec tmover wait --srun $!\n"
    )
    cluster.env["TMOVER_TRACE"] = str(cluster.home / f"{name}.trace")
    said = cluster.tmover("submit", script.name, "--nodes=2", "--exclusive").stdout
    return Job(cluster, said.split()[1])


def outcome(cluster: Cluster, name: str, job: Job) -> Outcome:
    status = job.until(lambda status: status.code is not None, "the end")
    assert status.code == 0, f"{status}\n{job.logs()}"
    return judge(read_trace(cluster.home / f"{name}.trace"), status, STEPS)


def test_a_job_that_no_node_came_for_is_requeued_and_goes_on_from_what_its_survivors_stored(
    cluster: Cluster, machines: Lab
) -> None:
    lab = machines
    cluster.env["TMOVER_DEADLINES_NODE_S"] = "2"
    lab.run("sbatch", "--no-requeue", "--exclusive", "-w", TAKEN, "--wrap", "exec sleep 600")
    lab.wait(lambda: [one.state for one in lab.squeue()] == ["RUNNING"], 30, "other nodes taken")
    with lab.configured(f"RequeueExit={REQUEUE}"):
        first = submitted(cluster, "first", "export TMOVER_RESUME=1")
        first.until(lambda status: status.step == HELD, f"step {HELD}")
        lost = first.node(1)
        lab.power_off(lost)
        first.until_lost(lost)
        first.go_on()
        before = Job(cluster, f"slurm{first.id}")
        ended = before.until(lambda status: status.code is not None, "the first's end")
        assert ended.code == REQUEUE, f"{ended}\n{first.logs()}"
        stored = {line["step"] for line in read_trace(cluster.home / "first.trace")
                  if line["event"] == "stored"}  # fmt: skip
        assert f"a checkpoint of step {min(stored)} is written" in ended.outcome

        again = Job(cluster, f"slurm{first.id}r1")
        lab.wait(lambda: cluster.knows(again.id), 60, "the next incarnation")
        lab.boot(lost)
        lab.wait(lambda: lab.states()[lost] == "idle", 60, f"{lost} again")
        lab.run("scontrol", "update", f"JobId={first.id}", "StartTime=now")
        resumed = outcome(cluster, "first", again)

    undisturbed = outcome(cluster, "second", submitted(cluster, "second"))
    assert [line["step"] for line in resumed.events("resumed")] == [*stored] * 2
    assert resumed.finals == undisturbed.finals
    assert len(resumed.finals) == 2
