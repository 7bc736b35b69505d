"""The commands for people, against a real controller and jobs that were forked."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from click.testing import CliRunner

from support.eventually import eventually
from tmover import wire
from tmover.cli.follow import follow
from tmover.cli.main import tmover
from tmover.cluster import JobSpec, LocalCluster
from tmover.config import Config, load
from tmover.process import is_alive
from tmover.wire import JobStatus

FOREVER = "1000000"

MakeSpec = Callable[..., JobSpec]


def run(cluster: LocalCluster, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(tmover, [*arguments, "--state", str(cluster.state)])
    return done.exit_code, done.output


def is_warm(status: JobStatus) -> bool:
    trains = status.phase == "training" and (status.step or 0) > 2
    return trains and any(standby.state == "warm" for standby in status.standbys)


@pytest.fixture
def cluster_config() -> Config:
    """A controller that was killed is not waited for long."""
    return load(environ={"TMOVER_CONTROLLER_REQUEST_S": "2"})


@pytest.fixture
def job(cluster: LocalCluster, spec: MakeSpec) -> str:
    """A job that trains, with a warm standby."""
    name = cluster.submit(spec(FOREVER, standby=1))
    cluster.wait(name, is_warm, timeout_s=60)
    return name


def test_a_move_is_followed_to_its_end(cluster: LocalCluster, job: str) -> None:
    code, output = run(cluster, "migrate", "node2", "--reason", "fan broken")

    lines = output.splitlines()
    assert code == 0, output
    assert lines[0].startswith("requested: ")
    assert "node2 is to be left: fan broken" in output
    assert lines[-1] == "done: node2 carries no rank any more"
    assert [slot.node for slot in cluster.status(job).slots] == ["node1", "node3"]


def test_a_move_can_be_followed_by_a_program(cluster: LocalCluster, job: str) -> None:
    code, output = run(cluster, "migrate", "node1", "--job", job, "--json")

    lines = [json.loads(line) for line in output.splitlines()]
    assert code == 0, output
    assert all(line.keys() == {"phase", "text"} for line in lines)
    assert (lines[0]["phase"], lines[-1]["phase"]) == ("requested", "done")


def test_one_need_not_wait_for_a_move(cluster: LocalCluster, job: str) -> None:
    code, output = run(cluster, "migrate", "node2", "--no-wait")

    assert code == 0
    assert [line.split(":")[0] for line in output.splitlines()] == ["requested"]
    cluster.wait(job, lambda status: status.slots[1].node == "node3", timeout_s=60)


def test_a_standby_can_be_sent_away(cluster: LocalCluster, job: str) -> None:
    code, output = run(cluster, "migrate", "node3")

    assert code == 0, output
    assert output.splitlines()[-1] == "done: node3 carries no rank any more"
    cluster.wait(job, lambda status: not status.standbys, timeout_s=60)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["migrate", "node9"], "job 1 is not on node9; it is on node1, node2, node3"),
        (["migrate", "node1", "--job", "5"], "there is no job 5 here"),
        (["status", "5"], "there is no job 5 here"),
        (["cancel", "5"], "there is no job 5 here"),
    ],
)
@pytest.mark.usefixtures("job")
def test_what_cannot_be_done_is_one_line(
    cluster: LocalCluster, arguments: list[str], complaint: str
) -> None:
    code, output = run(cluster, *arguments)

    assert code == 1
    assert output == f"error: {output[len('error: ') :].strip()}\n"
    assert complaint in output


def test_the_status_of_a_job_is_shown(cluster: LocalCluster, job: str) -> None:
    code, output = run(cluster, "status")

    assert code == 0
    assert output.startswith(f"JOB {job}  training  step ")
    assert "\n0     node1" in output
    assert re.search(r"\n\([01]\)   node3", output)


def test_the_status_of_a_job_can_be_read_by_a_program(cluster: LocalCluster, job: str) -> None:
    code, output = run(cluster, "status", job, "--json")

    (status,) = msgspec.json.decode(output, type=list[JobStatus])
    assert code == 0
    assert [slot.node for slot in status.slots] == ["node1", "node2"]
    assert status.standbys[0].node == "node3"


def test_without_jobs_there_is_nothing_to_show(cluster: LocalCluster) -> None:
    cluster.ensure_controller()

    assert run(cluster, "status") == (0, "no jobs\n")


def test_of_the_jobs_that_have_ended_the_last_ones_are_shown(cluster: LocalCluster) -> None:
    cluster.ensure_controller()
    for _ in range(5):
        made = cluster.ask(wire.SubmitRequest(nnodes=1, nproc=1, owner="me")).job
        if made != "2":
            cluster.ask(wire.CancelRequest(job=made, reason="enough"))

    code, output = run(cluster, "status")
    _, everything = run(cluster, "status", "--all")
    cluster.ask(wire.CancelRequest(job="2", reason="enough"))

    shown = re.findall(r"^JOB (\d)", output, re.MULTILINE)
    assert (code, shown) == (0, ["2", "3", "4", "5"])
    assert output.endswith("\n1 more have ended: `tmover status --all` shows them\n")
    assert re.findall(r"^JOB (\d)", everything, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "more have ended" not in everything


def test_a_job_is_cancelled(cluster: LocalCluster, job: str) -> None:
    code, output = run(cluster, "cancel", "--reason", "enough")

    assert code == 0
    assert output.count("\n") == 1
    status = cluster.wait(job, lambda status: status.code is not None, timeout_s=60)
    assert (status.code, status.outcome) == (130, "enough")
    eventually(lambda: not cluster.scheduler.running(job))


def test_a_wrong_key_is_one_line(cluster: LocalCluster) -> None:
    cluster.ensure_controller()
    key = cluster.state / "keys" / "server.pub"
    good = key.read_text()
    key.write_text("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7\n")

    code, output = run(cluster, "status")

    key.write_text(good)
    assert code == 2
    assert output.startswith("error: the controller at tcp://127.0.0.1:")
    assert output.count("\n") == 1


def test_a_second_controller_on_the_same_directory_is_refused(cluster: LocalCluster) -> None:
    cluster.ensure_controller()

    code, output = run(cluster, "controller")

    assert code == 2
    assert output.count("\n") == 1
    assert output.startswith("error: ")


def test_a_port_in_use_is_one_line(cluster: LocalCluster, tmp_path: pathlib.Path) -> None:
    cluster.ensure_controller()
    address = json.loads((cluster.state / "controller.json").read_text())["address"]

    arguments = ["controller", "--state", str(tmp_path / "other"), "--bind", address]
    done = CliRunner().invoke(tmover, arguments)

    assert done.exit_code == 2
    assert done.output.startswith(f"error: cannot listen on {address}: address already in use")


# --- what `tmover submit` shows -------------------------------------------------------------------


def test_a_job_is_followed_to_its_end(cluster: LocalCluster, spec: MakeSpec) -> None:
    said: list[str] = []

    code = follow(cluster, cluster.submit(spec("20")), said.append)

    assert code == 0
    assert said[-1] == "job 1 has ended: done, exit code 0"
    assert any("all 2 ranks train in epoch 1" in line for line in said)


def test_a_job_s_own_failure_is_its_exit_code(cluster: LocalCluster, spec: MakeSpec) -> None:
    said: list[str] = []
    fails = "raise SystemExit(7)"

    code = follow(cluster, cluster.submit(spec(text=fails, nodes=1)), said.append)

    assert code == 7
    assert said[-1].startswith("job 1 has ended: ")


def test_a_controller_that_dies_is_started_again(cluster: LocalCluster, spec: MakeSpec) -> None:
    job = cluster.submit(spec(FOREVER, nodes=1))
    said: list[str] = []
    codes: list[int] = []
    watching = threading.Thread(target=lambda: codes.append(follow(cluster, job, said.append)))
    watching.start()
    cluster.wait(job, lambda status: status.phase == "training", timeout_s=60)
    before = cluster.controller()

    cluster.kill_controller()

    eventually(lambda: cluster.controller() not in (None, before))
    run(cluster, "cancel")
    watching.join(60)
    assert codes == [130]
    assert any("starting another one" in line for line in said)


@contextlib.contextmanager
def followed(cluster: LocalCluster, job: str, said: list[str]) -> Iterator[list[int]]:
    """Follow the job in a thread; at the end of the block it is cancelled and its code is there."""
    codes: list[int] = []
    watching = threading.Thread(target=lambda: codes.append(follow(cluster, job, said.append)))
    watching.start()
    try:
        yield codes
    finally:
        run(cluster, "cancel", job)
        watching.join(60)


def test_a_job_outlives_a_controller_that_cannot_start_again(
    cluster: LocalCluster, spec: MakeSpec
) -> None:
    job = cluster.submit(spec(FOREVER, nodes=1))
    said: list[str] = []
    with followed(cluster, job, said) as codes:
        cluster.wait(job, lambda status: status.phase == "training", timeout_s=60)
        journal = cluster.state / "journal" / f"{job}.jsonl"
        good = journal.read_bytes()
        journal.write_bytes(good.replace(b'"sum":"', b'"sum":"x', 1))

        cluster.kill_controller()

        eventually(lambda: any("line 1 is damaged" in line for line in said))
        assert (codes, cluster.scheduler.running(job)) == ([], ["node1"])
        journal.write_bytes(good)
        cluster.wait(job, lambda status: status.phase == "training", timeout_s=60)
    assert codes == [130]
    assert sum("line 1 is damaged" in line for line in said) == 1


def test_a_key_that_cannot_be_used_for_a_moment_does_not_end_the_job(
    cluster: LocalCluster, spec: MakeSpec
) -> None:
    job = cluster.submit(spec(FOREVER, nodes=1))
    key = cluster.state / "keys" / "client.key"
    said: list[str] = []
    with followed(cluster, job, said) as codes:
        cluster.wait(job, lambda status: status.phase == "training", timeout_s=60)

        key.chmod(0o644)
        eventually(lambda: any("can be read by others" in line for line in said))
        key.chmod(0o600)

        cluster.wait(job, lambda status: status.phase == "training", timeout_s=60)
        assert codes == []
    assert codes == [130]


def test_a_job_whose_state_directory_is_removed_ends_and_leaves_nothing(
    cluster: LocalCluster, spec: MakeSpec
) -> None:
    said: list[str] = []
    job = cluster.submit(spec(FOREVER, nodes=1))
    cluster.wait(job, lambda status: status.phase == "training", timeout_s=60)
    controller, holder = cluster.controller(), cluster.scheduler.holder("node1")
    assert controller is not None
    assert holder is not None

    shutil.rmtree(cluster.state)

    assert follow(cluster, job, said.append) == 1
    gone = f"the state directory {cluster.state} is gone"
    assert said == [f"{gone}: job 1 can be reached no more, and ends"]
    cluster.close()
    assert not is_alive(holder)
    eventually(lambda: not is_alive(controller))


def test_a_job_of_which_nothing_runs_is_given_up(
    cluster: LocalCluster, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    argv = ("sh", "-c", "echo there is no torch here; exit 1")
    broken = JobSpec(
        nodes=1, standby=0, nproc=1, argv=argv, env=dict(os.environ), cwd=pathlib.Path("/")
    )
    del spec, monkeypatch

    code = follow(cluster, cluster.submit(broken), said.append, patience_s=0.2)

    assert code == 1
    assert said[-1] == f"nothing of job 1 runs any more; see the logs in {cluster.logs('1')}"
