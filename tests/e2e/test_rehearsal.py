"""What a standby rehearses with: what ranks of the job have seen, and its own node's ranks."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.wire import JobStatus

SCRIPT = pathlib.Path(__file__).parent / "train_guarded.py"
KIND = Kind(nodes=2, nproc=2, steps=10, script=SCRIPT)
PIPELINES = Kind(
    nodes=4, steps=12, arguments=("--pipelines", "2"), script=SCRIPT.with_name("train_pipeline.py")
)
SHARDED = Kind(nodes=4, steps=12, script=SCRIPT.with_name("train_sharded.py"))
HELD = 5


def saw(log: str, where: str, rank: int) -> dict[int, list[str]]:
    """Return, by step, what a rank has printed of what it has received."""
    lines = [line.split() for line in log.splitlines() if line.startswith(f"saw {where} {rank} ")]
    return {int(words[3]): words[4:] for words in lines}


def test_a_script_that_checks_what_it_is_told_rehearses_with_what_was_recorded(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    """Made-up values trip it, before the recording is there; with that it sees the same bits."""
    training = Training(cluster, KIND, hold_at=HELD)
    status = training.until_movable()
    told = {standby.recorded for standby in status.standbys}
    training.cluster.move(training.job, training.node_of(1))
    training.until(lambda status: status.phase in {"armed", "switching"})
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert told == {"recorded values of rank 0; inside the node real"}
    log = training.log()
    recorded = saw(log, "trained", 0)
    for rank in (2, 3):
        rehearsed = saw(log, "rehearsed", rank)
        assert set(rehearsed) >= {
            0,
            1,
            2,
        }  # and one step more, to prove that it can be another rank
        for step in range(3):
            inside, digest, _ = rehearsed[step]
            assert inside == "5.0"
            assert digest == recorded[step][1]
    (written,) = outcome.events("recorded")
    assert (written["rank"], written["ranks"]) == (0, [0, 1, 2, 3])
    paths = {rank: [words[2] for words in saw(log, "trained", rank).values()] for rank in (0, 1)}
    assert paths[0] == ["recording"] * 2 + ["group"] * 8
    assert paths[1] == ["group"] * 10


def has_recorded(status: JobStatus) -> bool:
    """Return whether a standby has rehearsed with recorded values."""
    return any("recorded values" in standby.recorded for standby in status.standbys)


NEAR = "; inside the node real"


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "rank", "near"),
    [
        pytest.param(PIPELINES, 0, "", id="stages"),
        pytest.param(dataclasses.replace(PIPELINES, fabric="generation"), 0, "", id="generation"),
        pytest.param(dataclasses.replace(PIPELINES, nodes=2, nproc=2), 0, NEAR, id="stages near"),
        pytest.param(Kind(steps=12), 0, "", id="DDP"),
        pytest.param(Kind(steps=12, nodes=2, nproc=2), 0, "", id="DDP near"),
        pytest.param(SHARDED, 1, "", id="FSDP"),
        pytest.param(
            dataclasses.replace(SHARDED, nodes=2, nproc=2, arguments=("--layout", "tp")),
            0,
            NEAR,
            id="TP near",
        ),
    ],
)
def test_a_standby_rehearses_with_what_a_rank_of_its_role_has_recorded(
    cluster: LocalCluster, undisturbed: Twin, kind: Kind, rank: int, near: str
) -> None:
    """Its workers are started anew once the recordings are there. Nothing is made up."""
    training = Training(cluster, kind, hold_at=HELD)
    (standby,) = training.until_movable().standbys
    training.until_traced("recorded", 1 + (rank > 0 or kind.script == PIPELINES.script))
    if not has_recorded(training.cluster.status(training.job)):
        os.kill(training.worker(standby.node).pid, signal.SIGKILL)
    training.until(has_recorded)
    told = {one.recorded for one in training.until_movable().standbys}
    training.cluster.move(training.job, training.node_of(kind.nodes - 1))
    training.until(lambda status: status.phase in {"armed", "switching"})
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert told == {f"recorded values of rank {rank}{near}"}, training.log()


@pytest.mark.full
def test_without_a_place_for_recordings_a_standby_makes_values_up_and_says_so(
    cluster: LocalCluster,
) -> None:
    training = Training(cluster, PIPELINES, hold_at=HELD, settings={"TMOVER_WORKER_RECORDINGS": ""})
    status = training.until_movable()
    training.open_gate()

    outcome = training.finish()

    assert outcome.status.code == 0
    assert not outcome.events("recorded")
    assert [one.recorded for one in status.standbys] == [
        "made-up values: worker.recordings is not set"
    ]
