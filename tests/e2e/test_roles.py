"""One standby for every slot: what it can take as it is, and what it rehearses before."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.wire import JobStatus, StandbyStatus

HERE = pathlib.Path(__file__).parent
FULL = pytest.mark.full
PIPELINE = Kind(
    nodes=6,
    steps=10,
    arguments=("--stages", "3", "--pipelines", "2", "--schedule", "gpipe"),
    script=HERE / "train_pipeline.py",
)
KEPT = [
    pytest.param("function", "`rank`"),
    pytest.param("module", "`KEPT`", marks=FULL),
    pytest.param("object", "settings['rank']", marks=FULL),
    pytest.param("closure", "`rank`", marks=FULL),
    pytest.param("tensor", "`scale`", marks=FULL),
    pytest.param("import", "`captured_settings.RANK`", marks=FULL),
]


def lost(slot: int, point: str = "in_backward") -> str:
    """Return the loss of a node in a step."""
    return f"killnode:rank={slot},step=6,point={point}"


def pairs(script: str, *arguments: str, nodes: int = 2) -> Kind:
    """Return a kind whose nodes have two ranks each."""
    return Kind(nodes=nodes, nproc=2, steps=10, arguments=arguments, script=HERE / script)


GRID = pairs("train_grid.py", nodes=4)


def captured(keep: str, *more: str) -> Kind:
    arguments = ("--keep", keep, *more)
    return Kind(nodes=3, steps=12, arguments=arguments, script=HERE / "train_captured.py")


def rested(training: Training) -> StandbyStatus:
    """Wait until the standby has rehearsed all that it rehearses; return what is shown of it."""

    def due(status: JobStatus) -> bool:
        return any(each.state == "warm" and (each.takes or each.rebuilds)
                   for each in status.standbys)  # fmt: skip

    training.until_movable()
    return training.until(due).standbys[0]


@pytest.mark.parametrize(
    "slot", [0, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL),
             pytest.param(3, marks=FULL), 4, pytest.param(5, marks=FULL)]
)  # fmt: skip
def test_one_standby_takes_any_slot_of_a_pipeline(
    cluster: LocalCluster, undisturbed: Twin, slot: int
) -> None:
    training = Training(cluster, PIPELINE, hold_at=3, inject=lost(slot))
    standby = rested(training)
    assert standby.rehearsed == (0, 1, 2, 3, 4, 5)
    assert standby.rebuilds == ""
    assert len(standby.takes) == 2
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(PIPELINE), PIPELINE)
    assert outcome.redone() <= 1
    assert outcome.status.slots[slot].node == standby.node
    assert outcome.status.slots[slot].agent == standby.agent


@pytest.mark.parametrize(("keep", "named"), KEPT)
def test_a_script_that_keeps_its_rank_is_found_out_and_run_again(
    cluster: LocalCluster, undisturbed: Twin, keep: str, named: str
) -> None:
    kind = captured(keep)
    training = Training(cluster, kind, hold_at=3, inject=lost(1))
    standby = rested(training)
    assert named in standby.rebuilds
    assert len(standby.takes) == 1
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.status.slots[1].agent == standby.agent


def test_a_script_that_asks_each_time_needs_no_other_rehearsal(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = captured("session")
    training = Training(cluster, kind, hold_at=3, inject=lost(1))
    standby = rested(training)
    assert standby.takes == (0, 1, 2)
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    casts = [line["cast"] for line in outcome.events("recast")]
    assert casts == [1]


def test_a_script_that_cannot_be_run_twice_is_started_afresh_for_the_slot_it_takes(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = captured("function", "--once")
    training = Training(cluster, kind, hold_at=3, inject=lost(1))
    standby = rested(training)
    assert "initialised twice" in standby.rebuilds
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.status.slots[1].agent == standby.agent


@pytest.mark.parametrize(
    ("kind", "takes"),
    [
        pytest.param(GRID, 2, id="pp x tp x dp"),
        pytest.param(pairs("train_small.py"), 2, id="ddp", marks=FULL),
        pytest.param(pairs("train_sharded.py", "--layout", "fsdp"), 1, id="fsdp", marks=FULL),
        pytest.param(pairs("train_sharded.py", "--layout", "hsdp"), 2, id="hsdp", marks=FULL),
        pytest.param(pairs("train_sharded.py", "--layout", "tp"), 2, id="tp x dp", marks=FULL),
    ],
)
def test_ranks_of_a_node_change_together(
    cluster: LocalCluster, undisturbed: Twin, kind: Kind, takes: int
) -> None:
    slot = kind.nodes - 1
    training = Training(cluster, kind, hold_at=3, inject=lost(2 * slot, "before_vote"))
    standby = rested(training)
    assert standby.rebuilds == ""
    assert len(standby.takes) == takes
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.status.slots[slot].agent == standby.agent


@FULL
def test_a_script_may_tell_roles_apart_itself(cluster: LocalCluster, undisturbed: Twin) -> None:
    kind = captured("session", "--roles")
    training = Training(cluster, kind, hold_at=3, inject=lost(0))
    standby = rested(training)
    assert standby.takes == (1, 2)
    assert standby.rehearsed == (0, 1, 2)
    training.open_gate()

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.status.slots[0].agent == standby.agent
