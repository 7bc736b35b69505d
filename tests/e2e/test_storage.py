"""Checkpoints on storage: what a job goes on from when all it held is lost."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Outcome, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

SHARDED = pathlib.Path(__file__).parent / "train_sharded.py"
REPLICAS = Kind(nodes=3)
SHARDS = Kind(nodes=3, arguments=("--layout", "fsdp"), script=SHARDED)
KINDS = pytest.mark.parametrize("kind", [REPLICAS, SHARDS], ids=["ddp", "fsdp"])
EVERY = 4
SAVED = 3
"""The step of the first checkpoint."""
HELD = 6
RESUME = {"TMOVER_RESUME": "1"}


@pytest.fixture
def saves(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "saves"


def into(saves: pathlib.Path, every: int = EVERY) -> tuple[str, ...]:
    return "--checkpoint", str(saves), str(every)


def steps_in(saves: pathlib.Path) -> list[str]:
    return sorted(path.name for path in saves.glob("step-*"))


def resumed_at(outcome: Outcome) -> set[int]:
    return {line["step"] for line in outcome.events("resumed")}


def assert_same_bits(outcome: Outcome, undisturbed: Outcome) -> None:
    assert outcome.status.code == 0, outcome.status
    assert outcome.finals == undisturbed.finals
    for key, samples in outcome.committed.items():
        assert samples == undisturbed.committed[key], key


@KINDS
def test_a_checkpoint_changes_no_bit_of_what_it_is_taken_of(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path, kind: Kind
) -> None:
    outcome = Training(cluster, kind, standby=0, arguments=into(saves)).finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert steps_in(saves) == ["step-15", "step-19"]


@KINDS
def test_a_new_job_goes_on_with_the_bits_of_one_that_was_cut_off(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path, kind: Kind
) -> None:
    lost = Training(cluster, kind, standby=0, hold_at=HELD, arguments=into(saves), name="lost")
    lost.until_held()
    lost.until_traced("stored", 1)
    for node in [lost.node_of(slot) for slot in range(kind.nodes)]:
        cluster.fail_node(node)
    cluster.end(lost.job, "all its nodes are gone")

    outcome = Training(cluster, kind, arguments=into(saves), settings=RESUME).finish()

    assert_same_bits(outcome, undisturbed(kind))
    assert resumed_at(outcome) == {SAVED}
    assert min(step for _, step in outcome.committed) == SAVED + 1


@KINDS
def test_a_job_that_has_lost_all_workers_goes_on_from_its_last_checkpoint(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path, kind: Kind
) -> None:
    training = Training(cluster, kind, standby=0, hold_at=HELD, arguments=into(saves))
    training.until_held()
    training.until_traced("stored", 1)

    for node in [training.node_of(slot) for slot in range(kind.nodes)]:
        cluster.kill_worker(node)
    training.open_gate()
    outcome = training.finish()

    assert_same_bits(outcome, undisturbed(kind))
    assert resumed_at(outcome) == {SAVED}
