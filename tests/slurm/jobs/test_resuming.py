"""A job that goes on, as another one, from the checkpoints of one that has ended."""

from __future__ import annotations

import pytest

from support.lab import Lab
from support.slurmjobs import HELD, ROOT, Cluster, Job
from support.training import Outcome, judge, read_trace

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

STEPS = 40
EVERY = 5


def submitted(cluster: Cluster, name: str, directory: str, *options: str) -> Job:
    """Submit a script that leaves checkpoints, with a trace of its own."""
    script = cluster.home / f"{name}.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --output=%x.%j.log\n"
        "srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log "
        f"tmover run {ROOT}/tests/e2e/train_small.py --steps {STEPS} "
        f"--checkpoint {cluster.home / directory} {EVERY} &\n"
        "exec tmover wait --srun $!\n"
    )
    cluster.env["TMOVER_TRACE"] = str(cluster.home / f"{name}.trace")
    said = cluster.tmover("submit", script.name, "--nodes=2", *options).stdout
    return Job(cluster, said.split()[1])


def outcome(cluster: Cluster, name: str, job: Job) -> Outcome:
    status = job.until(lambda status: status.code is not None, "the end")
    assert status.code == 0, job.logs()
    return judge(read_trace(cluster.home / f"{name}.trace"), status, STEPS)


def test_resume_goes_on_from_the_newest_whole_checkpoint(cluster: Cluster, lab: Lab) -> None:
    first = submitted(cluster, "first", "kept")
    newest = cluster.home / "kept" / f"step-{HELD - 1}"
    lab.wait(newest.exists, 120, f"{newest.name}, before rank 0 holds after step {HELD}")
    lab.run("scancel", first.id)
    lab.wait(lambda: not lab.squeue(), 60, "an empty squeue")
    cluster.gate(HELD).touch()

    resumed = submitted(cluster, "second", "kept", "--resume")
    second = outcome(cluster, "second", resumed)
    third = outcome(cluster, "third", submitted(cluster, "third", "others"))

    assert [line["step"] for line in second.events("resumed")] == [HELD - 1] * 2
    assert min(line["step"] for line in second.events("committed")) == HELD
    assert second.finals == third.finals
    assert len(third.finals) == 2


def test_resume_without_a_checkpoint_begins_at_the_first_step_and_says_so(
    cluster: Cluster,
) -> None:
    cluster.gate(HELD).touch()
    job = submitted(cluster, "first", "nothing", "--resume")

    found = outcome(cluster, "first", job)

    assert not found.events("resumed")
    assert min(line["step"] for line in found.events("committed")) == 0
    assert "holds no checkpoint: training begins at its first step" in job.logs()
