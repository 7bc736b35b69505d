"""The real chain: `tmover submit`, `tmover controller`, `tmover run`, torchrun, workers."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
from collections.abc import Callable, Iterator

import psutil
import pytest

from support.eventually import eventually
from tmover.agent.launcher import count_workers
from tmover.cluster import JobSpec, LocalCluster, agent_argv
from tmover.config import Config
from tmover.controller.client import read_address
from tmover.process import (
    ProcessId,
    children,
    descendants,
    is_alive,
    python_argv,
    send_signal,
)
from tmover.scheduler.interface import NodeState
from tmover.scheduler.local import LocalScheduler
from tmover.wire import JobStatus

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(300)]

LONG_S = 200.0
FOREVER = "1000000"

MakeSpec = Callable[..., JobSpec]


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state"


@pytest.fixture
def real(state: pathlib.Path) -> Iterator[LocalCluster]:
    with LocalCluster(state, Config()) as made:
        yield made


def submit(state: pathlib.Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*python_argv("tmover"), "submit", "--local", "--state", str(state), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def read_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if word in line:
            return seen
    raise AssertionError(seen)


def test_a_job_runs_to_its_end_and_nothing_is_left(
    state: pathlib.Path, train: pathlib.Path
) -> None:
    with submit(state, "--nodes", "2", "--", str(train), "10") as command:
        output, _ = command.communicate(timeout=LONG_S)

    assert command.returncode == 0, output
    assert output.startswith("job 1 starts on node[1-2]\n")
    assert "job 1 has ended: done, exit code 0" in output
    assert "committed 9" in (state / "logs/1/node1.log").read_text()
    assert not (state / "controller.json").exists()
    assert {n.state for n in LocalScheduler(state / "cluster").nodes()} == {NodeState.IDLE}


def test_ctrl_c_cancels_the_job_and_cleans_up(state: pathlib.Path, train: pathlib.Path) -> None:
    with submit(state, "--", str(train), FOREVER) as command:
        read_until(command, "ranks train in epoch 1")
        command.send_signal(signal.SIGINT)
        output, _ = command.communicate(timeout=LONG_S)

    assert command.returncode == 130, output
    assert not (state / "controller.json").exists()
    assert {n.state for n in LocalScheduler(state / "cluster").nodes()} == {NodeState.IDLE}


def test_the_controller_that_is_started_reads_the_configuration_file_too(
    state: pathlib.Path, train: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "tmover.toml").write_text('[controller]\nbind = "tcp://127.0.0.3:0"\n')
    with submit(state, "--config", str(tmp_path / "tmover.toml"), "--", str(train), "1") as command:
        read_until(command, "job 1 starts")
        address = read_address(state).address
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=LONG_S)

    assert address.startswith("tcp://127.0.0.3:")


@pytest.mark.full
def test_ctrl_c_during_the_start_cleans_up_too(state: pathlib.Path, train: pathlib.Path) -> None:
    with submit(state, "--", str(train), FOREVER) as command:
        read_until(command, "job 1 starts")
        command.send_signal(signal.SIGINT)
        output, _ = command.communicate(timeout=LONG_S)

    assert command.returncode == 130, output
    assert not (state / "controller.json").exists()


@pytest.mark.full
def test_a_detached_job_goes_on_and_cleans_up_when_it_has_ended(
    state: pathlib.Path, train: pathlib.Path
) -> None:
    with submit(state, "--detach", "--", str(train), "10") as command:
        output, _ = command.communicate(timeout=LONG_S)

    assert command.returncode == 0, output
    assert "cancel   tmover cancel 1" in output
    log = state / "logs/1/submit.log"
    eventually(lambda: "has ended: done" in log.read_text(), timeout_s=LONG_S)
    eventually(lambda: not (state / "controller.json").exists())


def chain(cluster: LocalCluster, node: str) -> list[ProcessId]:
    """Return agent, torchrun and worker."""
    holder = cluster.scheduler.holder(node)
    assert holder is not None
    (agent,) = children(holder.pid)
    (torchrun,) = children(agent.pid)
    return [agent, torchrun, *children(torchrun.pid)]


def test_no_process_dies_of_what_slurm_sends_before_the_time_limit_however_early(
    real: LocalCluster, spec: MakeSpec
) -> None:
    job = real.submit(spec(FOREVER, nodes=1))
    holder = eventually(lambda: real.scheduler.holder("node1"))
    assert holder is not None
    (agent,) = eventually(lambda: children(holder.pid))
    eventually(lambda: children(agent.pid), timeout_s=LONG_S)

    signalled: set[ProcessId] = set()

    def trains_under_signals() -> bool:
        for process in descendants(agent.pid):
            signalled.add(process)
            send_signal(process, signal.SIGUSR1)
            send_signal(process, signal.SIGUSR2)
        return _trains(real.status(job))

    eventually(trains_under_signals, timeout_s=LONG_S)
    assert set(chain(real, "node1")) <= signalled
    assert all(is_alive(process) for process in chain(real, "node1"))
    assert real.status(job).epoch == 1


def test_whichever_process_is_killed_the_others_go_with_it_and_the_node_is_replaced(
    real: LocalCluster, spec: MakeSpec
) -> None:
    job = real.submit(spec(FOREVER, nodes=1))
    real.wait(job, _trains, timeout_s=LONG_S)
    agent, torchrun, worker = chain(real, "node1")
    assert not _listening(agent) + _listening(torchrun), "torchrun reads pickles from whoever comes"
    assert _listening(worker) == ["127.0.0.2"]

    os.kill(torchrun.pid, signal.SIGKILL)

    eventually(lambda: not is_alive(worker))
    real.wait(job, lambda s: not _trains(s), timeout_s=LONG_S)
    assert is_alive(agent)
    eventually(lambda: len(_chain_or_nothing(real, "node1")) == 3, timeout_s=LONG_S)
    before = descendants(agent.pid)
    os.kill(agent.pid, signal.SIGKILL)
    eventually(lambda: not any(is_alive(process) for process in before))


def _listening(process: ProcessId) -> list[str]:
    """Return the addresses on which a process waits for connections."""
    found = psutil.Process(process.pid).net_connections("inet")
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]


def _chain_or_nothing(cluster: LocalCluster, node: str) -> list[ProcessId]:
    try:
        return chain(cluster, node)
    except ValueError:
        return []


def _trains(status: JobStatus) -> bool:
    return status.phase == "training"


@pytest.mark.full
def test_torchrun_s_flags_do_what_they_do_there(
    real: LocalCluster, spec: MakeSpec, tmp_path: pathlib.Path
) -> None:
    made = spec(text="import os; print('rank', os.environ['LOCAL_RANK'])", nodes=1, nproc=2)
    script = made.argv[-1]
    flags = ("--redirects", "1", "--log-dir", str(tmp_path / "out"))
    argv = agent_argv(script, nproc=2, flags=flags)

    job = real.submit(JobSpec(nodes=1, standby=0, nproc=2, argv=argv, env=made.env, cwd=made.cwd))

    real.wait(job, lambda status: status.code == 0, timeout_s=LONG_S)
    texts = sorted(file.read_text() for file in (tmp_path / "out").rglob("stdout.log"))
    assert texts == ["rank 0\n", "rank 1\n"]


@pytest.mark.full
def test_a_number_of_workers_may_be_torch_s_to_say() -> None:
    assert count_workers("cpu") == os.cpu_count()
