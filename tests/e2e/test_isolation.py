"""A script that writes without asking: nothing of its rehearsals reaches the job."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import psutil
import pytest
import torch

from e2e.conftest import Twin
from support.eventually import eventually
from support.training import Kind, Outcome, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.process import ProcessId, wait_gone

KIND = Kind(nodes=2, steps=12, script=pathlib.Path(__file__).parent / "train_careless.py")
HELD = 4


def careless(cluster: LocalCluster, settings: Mapping[str, str], *, standby: int = 1) -> Training:
    return Training(cluster, KIND, hold_at=HELD, standby=standby, settings=settings)


def own_lines(cluster: LocalCluster, rank: int) -> list[str]:
    return (cluster.state / "logs" / f"rank{rank}.log").read_text().splitlines()


def move_who_saves(training: Training) -> Outcome:
    """Let the standby take the last rank while rank 0 holds its step."""
    training.cluster.move(training.job, training.node_of(1))
    training.until(lambda status: status.phase in {"armed", "switching"})
    training.open_gate()
    return training.finish()


def test_a_joiner_writes_the_job_s_files_from_its_first_real_step_on_and_not_before(
    cluster: LocalCluster, undisturbed: Twin, tmp_path: pathlib.Path
) -> None:
    scratch = tmp_path / "scratch"
    training = careless(cluster, {"TMOVER_WORKER_SCRATCH": str(scratch)})
    training.until_movable()
    leaver, saved = training.worker(training.node_of(1)), cluster.state / "saved"
    eventually(lambda: len((saved / "last.pids").read_text().split()) == HELD + 1)
    assert torch.load(saved / "last.pt") == {"step": HELD}  # the standby has saved its own step 2
    assert set((saved / "last.pids").read_text().split()) == {str(leaver.pid)}
    assert torch.load(saved / "first.pt") == {"step": HELD}  # so has a standby that rests there
    assert list(scratch.rglob("first.pt"))

    outcome = move_who_saves(training)

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    # the leaver has written what follows the last step it has done; from there the joiner writes
    steps = [int(line.split()[0]) for line in own_lines(cluster, 1)]
    assert steps == list(range(KIND.steps))
    assert all(line.endswith("True") for rank in (0, 1) for line in own_lines(cluster, rank))
    assert torch.load(saved / "last.pt") == {"step": KIND.steps - 1}
    eventually(lambda: not list(scratch.rglob("*.pt")))


def test_a_standby_that_never_trains_ends_unseen(cluster: LocalCluster) -> None:
    training = careless(cluster, {})
    training.until_movable()
    [standby] = training.cluster.status(training.job).standbys
    spare, members = training.worker(standby.node), [training.node_of(slot) for slot in (0, 1)]
    workers = [training.worker(node) for node in members]
    training.open_gate()

    outcome = training.finish()

    assert outcome.status.code == 0, outcome.status
    assert not wait_gone((spare, *workers), timeout_s=20)
    ended = (cluster.state / "logs" / "ended.log").read_text().split()
    assert sorted(ended) == sorted(2 * [str(worker.pid) for worker in workers])
    assert f"the end of {workers[0].pid}" in training.log()
    assert f"the end of {spare.pid}" not in training.log()
    assert "the rehearsal writes" in training.log()


@pytest.mark.parametrize("way", ["error", pytest.param("exit", marks=pytest.mark.full)])
def test_a_standby_that_fails_at_rest_ends_unseen(cluster: LocalCluster, way: str) -> None:
    often = {"TMOVER_WORKER_PROVE_EVERY_S": "0.2"}
    fails = ("--fail", way)
    training = Training(cluster, KIND, hold_at=HELD, settings=often, arguments=fails)
    training.until_held()

    training.until(lambda status: any("are started afresh" in note for note in status.notes))

    assert not (cluster.state / "logs" / "ended.log").exists()
    assert "it is tired" in training.log()
    assert "the end of" not in training.log()
    training.open_gate()
    assert training.finish().status.code == 0


def test_a_rehearsing_standby_speaks_to_no_other_node(cluster: LocalCluster) -> None:
    training = careless(cluster, {"TMOVER_COMM_NEARBY": "0"})
    training.until_movable()
    [standby] = training.cluster.status(training.job).standbys
    spare = training.worker(standby.node)

    assert not peers(spare)
    members = [training.worker(training.node_of(slot)) for slot in (0, 1)]
    assert all(peers(member) for member in members), "real ranks do, so this would be seen"

    training.open_gate()
    assert training.finish().status.code == 0


def peers(process: ProcessId) -> list[object]:
    """Return the addresses that a process is connected to over the network."""
    connections = psutil.Process(process.pid).net_connections("inet")
    return [each.raddr for each in connections if each.raddr]
