"""A node that becomes slow is found out, and its ranks move to a standby by themselves."""

from __future__ import annotations

import dataclasses

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cli.status import render
from tmover.cluster import LocalCluster

KIND = Kind(steps=300)
SLOW = "slow:node=node2,point=step_open,step=10,seconds=0.05"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is long enough, and only what is slowed on purpose is slow by so much."""
    monkeypatch.setenv("TMOVER_CONTROLLER_STRAGGLER_FOR_S", "1")
    monkeypatch.setenv("TMOVER_CONTROLLER_STRAGGLER_MARGIN", "2.5")


def test_a_straggler_is_moved_by_itself_and_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMOVER_CONTROLLER_STRAGGLERS", "act")
    training = Training(cluster, KIND, inject=SLOW)

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 0
    assert [slot.node for slot in outcome.status.slots] == ["node1", "node4", "node3"]
    assert any(
        note.partition(" ")[2].startswith("node2 is to be left: node2 is ")
        for note in outcome.status.notes
    )


def test_a_straggler_is_named_and_left_alone_by_default(cluster: LocalCluster) -> None:
    forever = dataclasses.replace(KIND, steps=100_000)
    training = Training(cluster, forever, standby=0, inject=SLOW)

    status = training.until(lambda status: bool(status.slow))

    slow = next(own for own in status.own if own.is_straggler)
    assert (slow.node, slow.against) == ("node2", "peers")
    assert slow.own_ms >= 50
    assert slow.ratio > 2.5
    shown = render(status)
    assert "slow: node2 is " in shown
    assert "`tmover migrate node2` would move it" in shown
    assert any("`tmover migrate node2` would move it" in note for note in status.notes)
