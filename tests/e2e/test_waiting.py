"""Several nodes lost or left at once, with as many standbys, with fewer, and with none."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from e2e.conftest import Twin
from support.forkserver import ForkServer
from support.training import Kind, Outcome, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.config import load
from tmover.core.events import REQUEUE
from tmover.core.incident import Incident
from tmover.wire import MoveRequest

FOUR = Kind(nodes=4)
THREE = Kind(nodes=3)
SHARDED = Kind(
    nodes=3,
    arguments=("--layout", "fsdp"),
    script=pathlib.Path(__file__).parent / "train_sharded.py",
)
BOTH = ";".join(f"killnode:node=node{number}-,step=7,point=in_vote" for number in (1, 3))
"""Nodes whose ranks keep no records for each other."""
ALONE = "kill:rank=1,step=7,point=before_vote"
RESUME = {"TMOVER_RESUME": "1"}


def last(outcome: Outcome) -> Incident:
    return outcome.status.incidents[-1]


def marks(incident: Incident) -> set[str]:
    return {mark.name for mark in incident.marks}


@pytest.mark.full
def test_two_nodes_lost_at_once_are_replaced_in_one_switch(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, FOUR, standby=2, hold_at=5, inject=BOTH)
    training.until_held()
    training.until(lambda s: [each.state for each in s.standbys] == ["warm", "warm"])
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(FOUR), FOUR, lost=2)
    found = last(outcome)
    assert {each.slot: each.path for each in found.handings} == {0: "standby", 2: "standby"}
    assert found.into == found.epoch + 1
    assert {"decided", "handed over", "passed", "first step"} <= marks(found)
    assert "waiting" not in marks(found)
    assert found.receive_s > 0


def test_of_two_nodes_lost_one_is_replaced_by_a_standby_and_one_by_a_node_ordered_then(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, FOUR, standby=1, hold_at=5, inject=BOTH)
    training.until_movable()
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(FOUR), FOUR, lost=2)
    incidents = outcome.status.incidents  # two, if one node is replaced before the other dies
    paths = [each.path for incident in incidents for each in incident.handings]
    assert sorted(paths) == ["new node", "standby"]
    assert {"waiting", "node ordered", "node came", "warm"} <= marks(incidents[-1])


def test_workers_that_die_alone_begin_again_on_their_node(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(cluster, THREE, standby=0, inject=ALONE)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(THREE), THREE)
    assert [slot.node for slot in outcome.status.slots] == ["node1", "node2", "node3"]
    assert [each.path for each in last(outcome).handings] == ["same node"]
    assert "node ordered" not in marks(last(outcome))


@pytest.mark.full
@pytest.mark.parametrize("standbys", [1, 2])
def test_of_two_nodes_to_be_left_as_many_go_at_once_as_there_are_standbys(
    cluster: LocalCluster, undisturbed: Twin, standbys: int
) -> None:
    kind = Kind(nodes=4, steps=60)
    training = Training(cluster, kind, standby=standbys, hold_at=5)
    training.until_held()
    training.until(lambda s: [each.state for each in s.standbys] == ["warm"] * standbys)

    cluster.ask(MoveRequest(job=training.job, node="node1", reason="fan", more=("node3",)))
    training.until(lambda status: status.move is not None and status.move.phase == "armed")
    training.open_gate()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0
    moved = [each for each in outcome.status.incidents if each.outcome == "moved"]
    assert len(moved[0].handings) == standbys
    assert "node1" not in {slot.node for slot in outcome.status.slots}


LIMITS = {"TMOVER_LOCAL_NODES": "3", "TMOVER_DEADLINES_NODE_S": "1"}


@pytest.fixture
def small(
    fork_server: ForkServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalCluster]:
    """A cluster of three nodes whose controller does not wait long for a fourth."""
    for name, value in LIMITS.items():
        monkeypatch.setenv(name, value)
    start, spawn = fork_server.start_controller, fork_server.spawn
    with LocalCluster(tmp_path / "small", load(), start=start, spawn=spawn) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        pytest.param(THREE, 1, id="replicas"),
        pytest.param(THREE, 0, id="first", marks=pytest.mark.full),
        pytest.param(SHARDED, 1, id="copies", marks=pytest.mark.full),
        pytest.param(SHARDED, 0, id="first copies", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("point", ["before_vote", pytest.param("in_vote", marks=pytest.mark.full)])
def test_survivors_for_whom_no_node_comes_store_all_and_a_new_job_goes_on_from_that(
    cluster: LocalCluster,
    small: LocalCluster,
    undisturbed: Twin,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    kind: Kind,
    rank: int,
    point: str,
) -> None:
    saves = ("--checkpoint", str(tmp_path / "saves"), "1000")
    fault = f"killnode:rank={rank},step=7,point={point}"
    ended = Training(small, kind, standby=0, inject=fault, arguments=saves).finish()

    assert ended.status.code == REQUEUE, ended.status
    stored = {line["step"] for line in ended.events("stored")}
    assert len(stored) == 1, ended.status.outcome
    assert f"a checkpoint of step {min(stored)} is written" in ended.status.outcome
    assert 5 <= min(stored) <= 7
    assert {"waiting", "storing"} <= marks(last(ended))
    for name in LIMITS:
        monkeypatch.delenv(name)
    outcome = Training(cluster, kind, arguments=saves, settings=RESUME).finish()

    assert outcome.status.code == 0, outcome.status
    assert {line["step"] for line in outcome.events("resumed")} == stored
    assert outcome.finals == undisturbed(kind).finals


@pytest.mark.full
@pytest.mark.parametrize("kind", [THREE, SHARDED])
def test_ranks_that_have_done_their_last_step_store_it_too(
    small: LocalCluster, tmp_path: pathlib.Path, kind: Kind
) -> None:
    saves = ("--checkpoint", str(tmp_path / "saves"), "1000")
    fault = "killnode:rank=1,point=at_finish"

    outcome = Training(small, kind, standby=0, inject=fault, arguments=saves).finish()

    assert outcome.status.code == REQUEUE, outcome.status
    after_loop = kind.steps  # the part after the loop counts as a step
    assert {line["step"] for line in outcome.events("stored")} == {after_loop}


@pytest.mark.full
def test_a_controller_that_starts_again_meanwhile_ends_the_wait_in_time(
    small: LocalCluster, tmp_path: pathlib.Path
) -> None:
    saves = ("--checkpoint", str(tmp_path / "saves"), "1000")
    fault = "killnode:rank=1,step=7,point=in_vote"
    training = Training(small, THREE, standby=0, inject=fault, arguments=saves)
    training.until(lambda status: status.waiting is not None or status.code is not None)

    small.kill_controller()
    small.ensure_controller()
    outcome = training.finish()

    assert outcome.status.code == REQUEUE, outcome.status
    assert "a checkpoint of step" in outcome.status.outcome


@pytest.mark.full
def test_survivors_without_a_directory_for_checkpoints_say_so(small: LocalCluster) -> None:
    outcome = Training(
        small, THREE, standby=0, inject="killnode:rank=1,step=7,point=in_vote"
    ).finish()

    assert outcome.status.code == REQUEUE
    assert "the script names no directory for checkpoints" in outcome.status.outcome
