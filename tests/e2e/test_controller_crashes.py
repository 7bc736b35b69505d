"""The controller is killed at ten chosen points of a move and of a failure of ranks that train."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import pytest

from e2e.conftest import Twin
from support.doomed import Doomed
from support.eventually import eventually
from support.forkserver import ForkServer
from support.training import PATIENCE_S, Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.config import Config
from tmover.errors import ControllerUnavailable

KIND = Kind(nodes=2, steps=24)
HELD = 5


@pytest.fixture
def point(request: pytest.FixtureRequest) -> tuple[str, str, int]:
    found: tuple[str, str, int] = request.param
    return found


@pytest.fixture
def doomed(
    point: tuple[str, str, int],
    fork_server: ForkServer,
    cluster_config: Config,
    tmp_path: pathlib.Path,
) -> Iterator[LocalCluster]:
    """A cluster whose first controller dies at the point."""
    with LocalCluster(
        tmp_path, cluster_config, start=Doomed(*point), spawn=fork_server.spawn
    ) as made:
        yield made


def _points(*points: tuple[str, str, int]) -> pytest.MarkDecorator:
    names = [f"{count}. {kind} ({what})" for what, kind, count in points]
    return pytest.mark.parametrize("point", points, ids=names, indirect=True)


def _see_it_die_and_return(cluster: LocalCluster) -> None:
    eventually(lambda: cluster.controller() is None, timeout_s=PATIENCE_S)
    cluster.ensure_controller()


@_points(
    ("line", "MoveRequested", 1),
    ("line", "Prepared", 3),
    ("order", "Arm", 2),
)
def test_a_move_whose_controller_is_killed_before_the_boundary_is_made_when_one_returns(
    doomed: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(doomed, KIND, hold_at=HELD)
    training.until_movable()
    leaver = training.node_of(0)

    with contextlib.suppress(ControllerUnavailable):  # it may die before it answers
        doomed.move(training.job, leaver)
    _see_it_die_and_return(doomed)
    training.until(lambda status: status.phase == "armed")
    training.until_traced("armed", KIND.nodes + 1)  # tiny steps: all must hear it before they end
    training.open_gate()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 0
    assert leaver not in {slot.node for slot in outcome.status.slots}


@_points(
    ("line", "Entered", 1),
    ("line", "Verified", 1),
    ("line", "Passed", 1),
)
def test_a_move_whose_controller_is_killed_at_the_barrier_loses_no_step(
    doomed: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(doomed, KIND, hold_at=HELD)
    training.until_movable()
    leaver = training.node_of(0)

    doomed.move(training.job, leaver)
    training.until(lambda status: status.phase == "armed")
    training.open_gate()
    _see_it_die_and_return(doomed)
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 0
    assert leaver not in {slot.node for slot in outcome.status.slots}


@_points(
    ("line", "Broken", 1),
    ("line", "Reported", 1),
    ("order", "Assign", 1),
    ("line", "Finished", 1),
)
def test_a_failure_whose_controller_is_killed_changes_no_bit(
    doomed: LocalCluster, undisturbed: Twin
) -> None:
    training = Training(doomed, KIND, inject="killnode:rank=0,step=7,point=in_vote")

    _see_it_die_and_return(doomed)
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
