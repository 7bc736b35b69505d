"""`tmover submit` on a real Slurm, as far as Slurm goes; what trains is in other tests."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from support.eventually import eventually
from support.lab import Lab
from tmover import wire
from tmover.controller.client import ask, read_address
from tmover.controller.starter import Starter
from tmover.process import python_argv, reap, send_signal, wait_gone

RUN = "srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log tmover run train.py"
SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=train --exclusive
if test -z "$TMOVER_STATE"; then
  {RUN}
fi
echo "$TMOVER_STATE $*" >"seen.$SLURM_JOB_ID"
exec sleep 600
"""
PER_NODE = f"""#!/bin/bash
#SBATCH --job-name=train --exclusive
echo "$SLURMD_NODENAME $TMOVER_SLOT $SLURM_JOB_NAME $*" >"script.$SLURMD_NODENAME"
srun -K0 sh -c 'echo $SLURMD_NODENAME $SLURM_NNODES >step.'"$SLURMD_NODENAME"'; exec sleep 600'
exit
{RUN}
"""


@pytest.fixture
def state(lab: Lab, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A state directory; a controller that runs there is ended after the test."""
    yield tmp_path / "state"
    controller = Starter(tmp_path / "state").running()
    if controller is not None:
        lab.reset()
        send_signal(controller, signal.SIGKILL)
        assert not wait_gone([controller], timeout_s=10)
        with contextlib.suppress(ChildProcessError):
            reap(controller.pid)


def write(lab: Lab, text: str) -> None:
    (lab.scratch / "train.sbatch").write_text(text)


def argv(state: pathlib.Path, *words: str) -> list[str]:
    return [*python_argv("tmover"), "submit", "--state", str(state), "train.sbatch", *words]


def submit(
    lab: Lab, state: pathlib.Path, *words: str, **env: str
) -> subprocess.CompletedProcess[str]:
    return lab.run(*argv(state, *words), check=False, env=env)


def fill(lab: Lab) -> None:
    """Have another job hold all nodes."""
    lab.run("sbatch", "-J", "other", "-N6", "--exclusive", "--wrap", "exec sleep 600")
    lab.wait(lambda: [each.state for each in lab.squeue()] == ["RUNNING"], 20, "it runs")


def show(lab: Lab, job: int) -> str:
    return lab.run("scontrol", "-o", "show", "job", str(job)).stdout


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def read(path: pathlib.Path) -> str:
    return eventually(lambda: path.read_text() if path.exists() else "")


def test_a_job_is_submitted_and_known(lab: Lab, state: pathlib.Path) -> None:
    write(lab, SCRIPT)

    shown = result(submit(lab, state, "--nodes=2", "--standby", "1", "--json", "--", "a b"))

    answer = ask(state, wire.StatusRequest(), 10.0)
    assert isinstance(answer, wire.StatusReply)
    assert [len(job.slots) for job in answer.jobs] == [2]
    assert (shown["name"], shown["nodes"], shown["state"]) == ("train", 2, "RUNNING")
    assert shown["logs"] == str(lab.scratch / f"train.{shown['slurm']}.*.log")
    assert " NumNodes=2 " in show(lab, shown["slurm"])
    assert read(lab.scratch / f"seen.{shown['slurm']}") == f"{state} a b\n"
    assert "127.0.0.1" not in read_address(state).address


def test_a_full_cluster_lets_it_wait(lab: Lab, state: pathlib.Path) -> None:
    write(lab, SCRIPT)
    fill(lab)

    shown = result(submit(lab, state, "-N2", "--json"))

    assert (shown["nodes"], shown["state"], shown["reason"]) == (2, "PENDING", "Resources")


@pytest.mark.parametrize(
    ("word", "complaint"),
    [("-pnone", "Invalid partition name"), ("--reservation=none", "reservation is invalid")],
)
def test_what_slurm_refuses_is_one_line(
    lab: Lab, state: pathlib.Path, word: str, complaint: str
) -> None:
    write(lab, SCRIPT)

    done = submit(lab, state, word)

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1)
    assert complaint in done.stderr
    assert lab.squeue() == []


def test_without_slurmctld_it_is_one_line_and_no_controller(lab: Lab, state: pathlib.Path) -> None:
    write(lab, SCRIPT)
    lab.stop_slurmctld()

    done = submit(lab, state)

    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert "slurmctld does not answer, nothing was submitted" in done.stderr
    assert not state.exists()


def test_a_dry_run_needs_no_slurmctld(lab: Lab, state: pathlib.Path) -> None:
    write(lab, SCRIPT)
    lab.stop_slurmctld()

    done = submit(lab, state, "-N2", "--standby", "1", "--dry-run", "--json")

    parts = json.loads(done.stdout)
    assert any(" sbatch --parsable " in part.get("command", "") for part in parts)
    assert any("##SBATCH" in part.get("script", "") for part in parts)
    assert not state.exists()


def test_a_job_that_cannot_be_made_known_is_cancelled(lab: Lab, state: pathlib.Path) -> None:
    write(lab, SCRIPT)
    result(submit(lab, state, "--json"))
    lab.run("scancel", "--name=train")
    public, secret = zmq.curve_keypair()
    (state / "keys" / "client.key").write_bytes(public + b"\n" + secret + b"\n")

    done = submit(lab, state, TMOVER_CONTROLLER_REQUEST_S="1")

    assert done.returncode == 2
    assert "does not accept the key" in done.stderr
    assert "is cancelled" in done.stderr
    lab.wait(lambda: not lab.squeue(), 20, "nothing is left")


def test_a_controller_out_of_the_nodes_reach_is_refused(lab: Lab, state: pathlib.Path) -> None:
    if not lab.isolated:
        pytest.skip("the nodes are this machine")
    write(lab, SCRIPT)
    bind = {"TMOVER_CONTROLLER_BIND": "tcp://127.0.0.1:1"}

    first = submit(lab, state, TMOVER_CONTROLLER_BIND="tcp://127.0.0.2:0")
    second = submit(lab, state, **bind)

    for done in (first, second):
        assert done.returncode == 2
        assert "which nodes such as node1 cannot reach" in done.stderr
    assert lab.squeue() == []


# --- without a batch host -------------------------------------------------------------------------


def test_every_node_runs_the_script_and_the_first_can_be_given_back(
    lab: Lab, state: pathlib.Path
) -> None:
    write(lab, PER_NODE)

    shown = result(submit(lab, state, "-N3", "--headless", "--json", "--", "a b"))

    job = str(shown["slurm"])
    held = lab.run("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
    nodes = lab.run("scontrol", "show", "hostnames", held).stdout.split()
    for slot, node in enumerate(nodes):
        assert read(lab.scratch / f"script.{node}") == f"{node} {slot} train a b\n"
        assert read(lab.scratch / f"step.{node}") == f"{node} 1\n"
    first, *others = nodes
    lab.run("scontrol", "update", f"JobId={job}", f"NodeList={','.join(others)}")
    lab.wait(lambda: lab.states()[first] == "idle", 20, f"{first} is idle")
    assert [(each.id, each.state) for each in lab.squeue()] == [(job, "RUNNING")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_that_waits_is_taken_back(
    lab: Lab, state: pathlib.Path, number: signal.Signals
) -> None:
    write(lab, PER_NODE)
    fill(lab)
    words = argv(state, "-N2", "--headless")
    with subprocess.Popen(
        words, env=lab.env, cwd=lab.scratch, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as command:  # fmt: skip
        assert command.stderr is not None
        said = command.stderr.readline()
        command.send_signal(number)
        code = command.wait(timeout=20)

    assert "waits for its nodes; Ctrl-C takes it back" in said
    assert code == 128 + number
    assert [each.name for each in lab.squeue()] == ["other"]


def test_headless_without_such_nodes_is_one_line(lab: Lab, state: pathlib.Path) -> None:
    write(lab, PER_NODE)

    done = submit(lab, state, "-N2", "-pnone", "--headless")

    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert "invalid partition" in done.stderr.lower()
    assert lab.squeue() == []
