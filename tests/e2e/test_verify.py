"""`tmover verify` says of a script whether it survives, and of one that does not, where and why."""

from __future__ import annotations

import io
import json
import pathlib
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from support.training import SCRIPT
from tmover.cluster import JobSpec, LocalCluster, agent_argv
from tmover.demo.screen import Screen
from tmover.verify.report import Report
from tmover.verify.runs import Failed, Runs
from tmover.verify.show import Verification

LOOP = """
import os, random, time, torch, tmover
from torch.nn.parallel import DistributedDataParallel as DDP
session = tmover.init(seed=3)
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
session.track(model=model, optimizer=optimizer)
data = torch.arange(96.0).view(24, 4) / 96
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
seen, mine = 0, random.Random(os.getpid())
for step in session.steps(loader, total=8):
    with step:
        {body}
        optimizer.step()
        optimizer.zero_grad()
    {after}
"""
SOUND = {"body": "model(step.batch).sum().backward()", "after": "pass"}
KILL = "kill:rank=1,node=node2-,step=4,point=before_vote"


def verify(
    cluster: LocalCluster, script: pathlib.Path, *arguments: str, faults: tuple[str, ...] = (KILL,)
) -> Report:
    spec = JobSpec(
        nodes=2,
        standby=1,
        nproc=1,
        argv=agent_argv(str(script), *arguments),
        env={"OMP_NUM_THREADS": "1"},
        cwd=cluster.state,
    )
    with Screen(Console(file=io.StringIO())) as screen:
        return Verification(Runs(cluster, screen, spec), screen, spec).report(faults, seed=5)


def written(folder: pathlib.Path, **parts: str) -> pathlib.Path:
    script = folder / "train.py"
    script.write_text(LOOP.format_map({**SOUND, **parts}))
    return script


def test_a_script_that_keeps_to_the_rules_is_equal_and_leaves_no_checkpoints(
    cluster: LocalCluster, tmp_path: pathlib.Path
) -> None:
    saves = tmp_path / "saves"

    report = verify(cluster, SCRIPT, "--steps", "10", "--checkpoint", str(saves), "2")

    assert (report.verified, report.parting) == (True, None)
    assert (report.steps, report.world_size, report.faults) == (10, 2, (KILL,))
    assert not saves.exists()


@pytest.mark.full
def test_faults_are_drawn_from_the_seed_where_none_is_given(cluster: LocalCluster) -> None:
    report = verify(cluster, SCRIPT, "--steps", "6", faults=())

    assert report.verified
    assert report.seed == 5
    assert len(report.faults) == 1
    assert report.missed == ()


def test_a_value_that_is_not_tracked_is_found_where_the_joiner_uses_it(
    cluster: LocalCluster, tmp_path: pathlib.Path
) -> None:
    script = written(
        tmp_path,
        body="(model(step.batch).sum() * (1 + seen)).backward()",
        after="seen += step.committed",
    )

    report = verify(cluster, script)

    assert (report.equal, report.deterministic) == (False, True)
    assert report.parting is not None
    assert report.parting.step == 4
    assert report.parting.joined == (1,)
    assert "model.weight" in report.parting.names
    assert any("not tracked" in cause for cause in report.causes)


def test_a_script_that_never_repeats_itself_is_told_from_one_that_a_loss_changes(
    cluster: LocalCluster, tmp_path: pathlib.Path
) -> None:
    script = written(tmp_path, body="(model(step.batch).sum() * mine.random()).backward()")

    report = verify(cluster, script)

    assert (report.equal, report.deterministic) == (False, False)
    assert report.parting is not None
    assert report.parting.step == 0
    assert any("not deterministic" in cause for cause in report.causes)


def test_a_fault_that_never_comes_proves_nothing(cluster: LocalCluster) -> None:
    never = "kill:rank=1,step=40,point=before_vote"

    report = verify(cluster, SCRIPT, "--steps", "6", faults=(never,))

    assert (report.equal, report.verified, report.missed) == (True, False, (never,))


def test_a_script_that_fails_by_itself_is_no_verdict(cluster: LocalCluster) -> None:
    with pytest.raises(Failed, match="the undisturbed run failed: "):
        verify(cluster, SCRIPT, "--steps", "6", "--fail-at", "3")


COMMAND = [sys.executable, "-m", "tmover", "verify"]


@pytest.mark.torchrun
def test_ctrl_c_ends_every_process_and_says_nothing_on_stdout() -> None:
    with subprocess.Popen(
        [*COMMAND, str(SCRIPT)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as verification:
        assert verification.stderr is not None
        assert "undisturbed run: 2 nodes, 2 ranks" in verification.stderr.readline()
        verification.send_signal(signal.SIGINT)
        output, errors = verification.communicate()

    assert (verification.returncode, output, errors.strip()) == (130, "", "interrupted")


@pytest.mark.full
@pytest.mark.torchrun
@pytest.mark.timeout(300)
def test_the_command_prints_an_object_and_tells_what_it_does_beside_it() -> None:
    done = subprocess.run(
        [*COMMAND, "--json", "--seed", "1", str(SCRIPT), "--steps", "6"],
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verified"], found["equal"], found["steps"]) == (True, True, 6)
    assert found["seed"] == 1
    assert f"run with --faults {found['faults'][0]}" in done.stderr
