"""Checkpoints on storage: what a job goes on from when all it held is lost."""

from __future__ import annotations

import pathlib
import signal

import pytest

from e2e.conftest import Twin
from support.training import Kind, Outcome, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.process import send_signal

SHARDED = pathlib.Path(__file__).parent / "train_sharded.py"
REPLICAS = Kind(nodes=3)
SHARDS = Kind(nodes=3, arguments=("--layout", "fsdp"), script=SHARDED)
WIDE = Kind(nodes=3, arguments=("--hidden", "1024"))
"""Whose gradients fill several buckets of DDP."""
FULL = pytest.mark.full
KINDS = pytest.mark.parametrize(
    "kind", [pytest.param(REPLICAS, id="ddp", marks=FULL), pytest.param(SHARDS, id="fsdp")]
)
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


def cut_off(cluster: LocalCluster, kind: Kind, saves: pathlib.Path, every: int = EVERY) -> None:
    """Leave what a job leaves whose nodes all lose power after its first checkpoint."""
    lost = Training(
        cluster, kind, standby=0, hold_at=HELD, arguments=into(saves, every), name="lost"
    )
    lost.until_held()
    lost.until_traced("stored", 1)
    for node in [lost.node_of(slot) for slot in range(kind.nodes)]:
        cluster.fail_node(node)
    cluster.end(lost.job, "all its nodes are gone")


@KINDS
def test_a_checkpoint_changes_no_bit_of_what_it_is_taken_of(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path, kind: Kind
) -> None:
    outcome = Training(cluster, kind, standby=0, arguments=into(saves)).finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert steps_in(saves) == ["step-15", "step-19"]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(REPLICAS, id="ddp", marks=FULL),
        pytest.param(SHARDS, id="fsdp"),
        pytest.param(WIDE, id="wide", marks=FULL),
    ],
)
def test_a_new_job_goes_on_with_the_bits_of_one_that_was_cut_off(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path, kind: Kind
) -> None:
    cut_off(cluster, kind, saves)

    outcome = Training(cluster, kind, arguments=into(saves), settings=RESUME).finish()

    assert_same_bits(outcome, undisturbed(kind))
    assert resumed_at(outcome) == {SAVED}
    assert min(step for _, step in outcome.committed) == SAVED + 1


def test_a_changed_bit_sets_a_checkpoint_aside_and_the_one_before_is_gone_on_from(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path
) -> None:
    Training(cluster, REPLICAS, standby=0, arguments=into(saves), name="whole").finish()
    assert steps_in(saves) == ["step-15", "step-19"]
    tensors = saves / "step-19" / "rank-00001" / "__0_0.distcp"
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)

    outcome = Training(
        cluster, REPLICAS, standby=0, arguments=into(saves), settings=RESUME
    ).finish()

    assert_same_bits(outcome, undisturbed(REPLICAS))
    assert resumed_at(outcome) == {15}
    assert steps_in(saves) == ["step-15", "step-19", "step-19.damaged"]


@FULL
def test_a_job_that_has_nothing_left_to_do_says_so_and_ends_well(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path
) -> None:
    Training(cluster, REPLICAS, standby=0, arguments=into(saves), name="whole").finish()

    over = Training(cluster, REPLICAS, standby=0, arguments=into(saves), settings=RESUME)
    outcome = over.finish()

    assert_same_bits(outcome, undisturbed(REPLICAS))
    assert outcome.committed == {}
    logs = [path.read_text() for path in cluster.logs(over.job).glob("node*.log")]
    assert "".join(logs).count("nothing is left to do") == 1


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


@KINDS
@pytest.mark.parametrize(
    ("held", "starts"), [pytest.param(SAVED + 1, 2, marks=FULL), (SAVED + 3, 1)]
)
def test_a_job_that_was_resumed_loses_a_node_like_any_other(
    cluster: LocalCluster,
    undisturbed: Twin,
    saves: pathlib.Path,
    kind: Kind,
    held: int,
    starts: int,
) -> None:
    cut_off(cluster, kind, saves)
    training = Training(cluster, kind, arguments=into(saves), settings=RESUME, hold_at=held)
    training.until_movable()

    cluster.fail_node(training.node_of(1))
    training.open_gate()
    outcome = training.finish()

    assert_same_bits(outcome, undisturbed(kind))
    assert outcome.status.epoch > 1
    assert len([line for line in outcome.events("resumed") if line["rank"] == 0]) == starts


def test_when_the_only_copies_are_lost_too_all_go_on_from_the_last_checkpoint(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path
) -> None:
    kind = SHARDS
    training = Training(cluster, kind, standby=2, hold_at=HELD, arguments=into(saves))
    training.until_movable()
    training.until_traced("stored", 1)
    lost = [training.node_of(slot) for slot in (1, 2)]

    for node in lost:
        cluster.fail_node(node)
    training.open_gate()
    outcome = training.finish()

    assert_same_bits(outcome, undisturbed(kind))
    assert resumed_at(outcome) == {SAVED}
    assert not {slot.node for slot in outcome.status.slots} & set(lost)


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        pytest.param(REPLICAS, 5, id="ddp-5"),
        pytest.param(SHARDS, 2, id="fsdp-2"),
        pytest.param(REPLICAS, 2, id="ddp-2", marks=FULL),
        pytest.param(SHARDS, 5, id="fsdp-5", marks=FULL),
    ],
)
def test_another_number_of_nodes_goes_on_where_all_samples_were_read(
    cluster: LocalCluster, saves: pathlib.Path, kind: Kind, nodes: int
) -> None:
    cut_off(cluster, kind, saves)
    other = Kind(nodes=nodes, arguments=kind.arguments, script=kind.script)

    outcome = Training(cluster, other, standby=0, arguments=into(saves), settings=RESUME).finish()

    assert outcome.status.code == 0, outcome.status
    assert resumed_at(outcome) == {SAVED}
    assert {step for _, step in outcome.committed} == set(range(SAVED + 1, kind.steps))


@pytest.mark.parametrize(
    "point",
    ["before_vote", *(pytest.param(point, marks=FULL) for point in ("step_open", "after_update"))],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_while_it_writes_leaves_no_half_a_checkpoint(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path, rank: int, point: str
) -> None:
    kind = Kind(nodes=3, arguments=("--hidden", "512"))
    step = SAVED + 1

    outcome = Training(
        cluster,
        kind,
        arguments=into(saves),
        inject=f"killnode:rank={rank},step={step},point={point}",
    ).finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert steps_in(saves) == ["step-15", "step-19"]


def test_a_checkpoint_is_taken_when_the_job_is_asked_for_one(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path
) -> None:
    training = Training(cluster, REPLICAS, standby=0, hold_at=HELD, arguments=into(saves, 1000))
    training.until_held()

    send_signal(training.worker(training.node_of(1)), signal.SIGUSR1)
    training.open_gate()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(REPLICAS), REPLICAS)
    assert steps_in(saves) == [f"step-{HELD + 2}"]


def test_a_job_that_was_not_asked_to_resume_does_not_touch_the_checkpoints_of_another(
    cluster: LocalCluster, saves: pathlib.Path
) -> None:
    cut_off(cluster, REPLICAS, saves)

    outcome = Training(cluster, REPLICAS, standby=0, arguments=into(saves)).finish()

    assert outcome.status.code != 0
    assert "go on from them with `tmover submit --resume`" in outcome.status.outcome
    assert steps_in(saves) == [f"step-{SAVED}"]
