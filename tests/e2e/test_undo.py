"""Steps with several updates, or collectives in them: undone as a whole if a node is lost."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

SCRIPT = pathlib.Path(__file__).parent / "train_undo.py"


def kind_of(what: str) -> Kind:
    return Kind(steps=12, arguments=("--what", what), script=SCRIPT)


FULL = pytest.mark.full
MORE = ["before_vote", "after_vote", "after_body"]


@pytest.mark.parametrize(
    "point",
    [
        "before_update",
        *(pytest.param(p, marks=FULL) for p in ("before_vote", "after_vote", "after_body")),
    ],
)
@pytest.mark.parametrize("what", ["gan", pytest.param("closure", marks=FULL)])
def test_what_was_updated_in_a_step_that_is_lost_is_undone(
    cluster: LocalCluster, undisturbed: Twin, what: str, point: str
) -> None:
    """`before_update` is before the first of a step's updates; other ranks are beyond it then.

    LBFGS remembers each rank's own loss, so its ranks are no replicas: they have copies.
    """
    kind = kind_of(what)
    training = Training(cluster, kind, inject=f"kill:rank=1,step=6,point={point}")

    outcome = training.finish()

    undone = int(what == "closure")
    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=undone)
    assert outcome.status.epoch > 1
    assert outcome.redone() <= 1


@pytest.mark.parametrize("rank", [pytest.param(0, marks=FULL), 2])
@pytest.mark.parametrize(
    "point",
    ["before_update", *(pytest.param(point, marks=FULL) for point in MORE[:2])],
)
def test_a_share_of_an_optimizer_is_taken_from_its_copy(
    cluster: LocalCluster, undisturbed: Twin, point: str, rank: int
) -> None:
    kind = kind_of("zero")
    training = Training(cluster, kind, inject=f"kill:rank={rank},step=6,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind, undone=1)
    assert outcome.status.epoch > 1
