from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tmover.errors import StateError
from tmover.state.capture import Tracked
from tmover.state.position import Position
from tmover.state.records import Record
from tmover.state.snapshot import Snapshot
from unit.state.conftest import HandOver


class Seen:
    """What one rank has counted."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2)
        self.names: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "names": self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.names = state["counts"], state["names"]


class Rank:
    """A rank with batch norm and something of its own."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.model.register_buffer("constant", torch.arange(3.0))
        self.seen = Seen()
        self.tracked = Tracked()
        self.tracked.track("model", self.model)
        self.tracked.track("seen", self.seen, per_rank=True)

    def live(self, samples: int) -> None:
        """Do what leaves traces in this rank alone."""
        for _ in range(samples):
            self.model(torch.randn(4, 3))
        self.seen.counts += samples
        self.seen.names.append(str(samples))
        random.random()
        np.random.randn()

    def record(self, position: Position | None = None) -> bytes:
        return Record.capture(self.tracked, position=position).encode()


def draw() -> list[float]:
    return [random.random(), float(np.random.randn()), torch.rand(()).item()]


def test_a_dead_ranks_state_is_made_of_anothers_and_its_record(hand_over: HandOver) -> None:
    dead, other, joiner = Rank(), Rank(), Rank()
    hand_over(dead.tracked, other.tracked)
    dead.live(3)
    record = dead.record(Position(1, 7, 99))
    expected = draw()
    other.live(5)
    joiner.live(2)

    received = hand_over(other.tracked, joiner.tracked, record=record)
    decoded = Record.decode(received.record)
    decoded.restore_private(joiner.tracked)
    decoded.restore_rng()

    assert draw() == expected
    assert decoded.position == Position(1, 7, 99)
    assert joiner.tracked.digest() == dead.tracked.digest()
    assert joiner.tracked.digest() != other.tracked.digest()
    assert joiner.seen.names == ["3"]


def test_a_record_made_of_a_record_is_the_same(hand_over: HandOver) -> None:
    dead, joiner = Rank(), Rank()
    dead.live(3)
    record = dead.record(Position(0, 1, 2))
    joiner.live(1)
    hand_over(dead.tracked, joiner.tracked)

    decoded = Record.decode(record)
    decoded.restore_private(joiner.tracked)
    decoded.restore_rng()

    assert Record.digest(joiner.record(Position(0, 1, 2))) == Record.digest(record)


def test_only_buffers_that_vary_are_in_a_record() -> None:
    rank = Rank()
    assert Record.decode(rank.record()).buffers == {}

    rank.live(1)

    buffers = Record.decode(rank.record()).buffers
    assert {k: sorted(v) for k, v in buffers.items()} == {
        "model": ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    }


def test_what_is_replicated_is_not_in_a_record_and_what_is_not_is(hand_over: HandOver) -> None:
    source, target = Rank(), Rank()
    source.live(4)

    hand_over(source.tracked, target.tracked)

    assert target.seen.names == []
    assert [*Record.decode(source.record()).objects] == ["seen"]


def test_what_was_received_is_what_an_attempt_goes_back_to(hand_over: HandOver) -> None:
    source, joiner = Rank(), Rank()
    source.live(2)
    source.model.constant.add_(1)  # type: ignore[operator]
    joiner.live(3)
    Snapshot(joiner.tracked)

    hand_over(source.tracked, joiner.tracked)
    assert joiner.tracked.buffers.varying() == {}
    Record.decode(source.record()).restore_private(joiner.tracked)

    for _ in range(2):
        snapshot = Snapshot(joiner.tracked)
        joiner.live(1)
        snapshot.restore(joiner.tracked)
        assert joiner.tracked.digest() == source.tracked.digest()


def test_restoring_draws_no_random_number() -> None:
    rank = Rank()
    rank.live(1)
    record = Record.decode(rank.record())
    torch.manual_seed(4)
    expected = draw()[2]
    torch.manual_seed(4)

    record.restore_private(rank.tracked)

    assert draw()[2] == expected


def test_a_whole_module_may_be_a_ranks_own(hand_over: HandOver) -> None:
    def build() -> tuple[nn.Module, Tracked]:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        tracked = Tracked()
        tracked.track("expert", module, per_rank=True)
        return module, tracked

    (source, theirs), (target, ours) = build(), build()
    source(torch.randn(4, 2))
    weight = next(target.parameters())

    Record.decode(Record.capture(theirs, position=None).encode()).restore_private(ours)

    assert ours.digest() == theirs.digest()
    assert next(target.parameters()) is weight


@pytest.mark.parametrize("change", ["rng", "position", "buffer", "object"])
def test_the_digest_of_a_record_changes_with_what_it_holds(change: str) -> None:
    rank = Rank()
    rank.live(1)
    position = Position(0, 1, 2)
    before = Record.digest(rank.record(position))
    assert Record.digest(rank.record(position)) == before

    if change == "rng":
        random.random()
    elif change == "position":
        position = Position(0, 2, 2)
    elif change == "buffer":
        rank.model[1].running_mean[0] += 1  # type: ignore[index,operator]
    else:
        rank.seen.counts[0] += 1

    assert Record.digest(rank.record(position)) != before


def averaged() -> tuple[nn.Sequential, Any, Tracked]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    average = torch.optim.swa_utils.AveragedModel(model[0])
    tracked = Tracked()
    tracked.track("model", model)
    tracked.track("average", average)
    return model, average, tracked


def test_what_every_rank_changes_after_the_vote_comes_from_the_source(hand_over: HandOver) -> None:
    """An averaged model counts after the update; the record of the vote has the count before it."""
    ranks = [averaged() for _ in range(3)]
    hand_over(ranks[0][2], ranks[1][2])
    records: list[bytes] = []
    for _ in range(2):
        records.clear()
        for model, _, tracked in ranks[:2]:
            model(torch.randn(4, 3))
            records.append(Record.capture(tracked, position=None).encode())
        for model, average, _ in ranks[:2]:
            average.update_parameters(model[0])
    (_, _, dead), (_, _, source), (_, average, joiner) = ranks

    received = hand_over(source, joiner, record=records[0], own=records[1])
    Record.decode(received.record).restore_private(joiner)

    assert average.n_averaged.item() == 2
    assert joiner.digest() == dead.digest() != source.digest()
    assert Record.digest(Record.capture(joiner, position=None, streams=b"").encode()) == (
        Record.digest(Record.capture(dead, position=None, streams=b"").encode())
    )


def test_whoever_takes_the_senders_place_gets_all_as_it_stands_at_the_boundary(
    hand_over: HandOver,
) -> None:
    leaver, joiner = Rank(), Rank()
    leaver.live(2)
    record = leaver.record(Position(1, 7, 99))
    expected = draw()
    leaver.live(1)  # behind optimizer.step()
    leaver.model.constant.add_(1)  # type: ignore[operator]

    received = hand_over(leaver.tracked, joiner.tracked, record=record, own=record)
    decoded = Record.decode(received.record)
    decoded.restore_private(joiner.tracked)
    decoded.restore_rng()

    assert joiner.seen.names == ["2", "1"]
    assert joiner.tracked.digest() == leaver.tracked.digest()
    assert decoded.position == Position(1, 7, 99)
    assert draw() == expected
    assert decoded.drift(joiner.tracked) == []


def test_who_has_just_joined_knows_what_is_newer_than_a_record_it_hands_on(
    hand_over: HandOver,
) -> None:
    """A rank is lost in the barrier of a move, and the keeper of its records is the joiner."""
    (leaver, leavers, leaving), (lost, losts, dead), (_, _, joiner), (_, last, another) = (
        averaged() for _ in range(4)
    )
    hand_over(leaving, dead)
    records: list[bytes] = []
    for _ in range(2):
        records.clear()
        for model, tracked in ((leaver, leaving), (lost, dead)):
            model(torch.randn(4, 3))
            records.append(Record.capture(tracked, position=None).encode())
        leavers.update_parameters(leaver[0])
        losts.update_parameters(lost[0])
    own, wards = records

    renewed = hand_over(leaving, joiner, record=own, own=own).record
    Record.decode(renewed).restore_private(joiner)
    received = hand_over(joiner, another, record=wards, own=renewed)
    Record.decode(received.record).restore_private(another)

    assert last.n_averaged.item() == 2
    assert another.digest() == dead.digest()


def test_a_joiner_that_is_lost_before_its_first_vote_has_left_what_changed_in_its_record(
    hand_over: HandOver,
) -> None:
    """Its keeper has a record of the vote, and the joiner's is of the boundary after it."""
    (leaver, leavers, leaving), (stayer, stayers, staying), (_, _, joiner), (_, last, another) = (
        averaged() for _ in range(4)
    )
    hand_over(leaving, staying)
    for _ in range(2):
        own, others = b"", b""
        for model, tracked in ((leaver, leaving), (stayer, staying)):
            model(torch.randn(4, 3))
            own, others = Record.capture(tracked, position=None).encode(), own
        leavers.update_parameters(leaver[0])
        stayers.update_parameters(stayer[0])
    renewed = hand_over(leaving, joiner, record=others, own=others).record
    Record.decode(renewed).restore_private(joiner)

    Record.decode(own).refuse_unknown(Record.decode(renewed), staying)
    received = hand_over(staying, another, record=renewed, own=own)
    Record.decode(received.record).restore_private(another)

    assert last.n_averaged.item() == 2
    assert another.digest() == joiner.digest() == leaving.digest()


def test_what_a_joiner_was_told_to_change_late_is_known_to_nobody(hand_over: HandOver) -> None:
    leaver, joiner, lost = Rank(), Rank(), Rank()
    leaver.live(2)
    lost.live(2)
    own, wards = leaver.record(), lost.record()
    leaver.seen.names.append("late")

    renewed = hand_over(leaver.tracked, joiner.tracked, record=own, own=own).record
    Record.decode(renewed).restore_private(joiner.tracked)

    with pytest.raises(StateError, match="the lost rank's `seen` changed after the vote"):
        Record.decode(renewed).refuse_unknown(Record.decode(wards), joiner.tracked)


def test_what_the_lost_rank_alone_changed_after_its_vote_is_known_to_nobody() -> None:
    lost, survivor = Rank(), Rank()
    lost.live(2)
    survivor.live(2)
    own, other = Record.decode(survivor.record()), Record.decode(lost.record())

    survivor.model.constant.add_(1)  # type: ignore[operator]
    own.refuse_unknown(other, survivor.tracked)  # equal at the vote: it changes alike

    survivor.model(torch.randn(4, 3))
    with pytest.raises(StateError, match=r"lost rank's `model\.1\.running_mean`, .* is lost with"):
        own.refuse_unknown(other, survivor.tracked)


def test_a_per_rank_object_that_changes_after_the_vote_is_named() -> None:
    lost, survivor = Rank(), Rank()
    own, other = Record.decode(survivor.record()), Record.decode(lost.record())
    assert own.late(survivor.tracked) == []

    survivor.seen.names.append("after the vote")

    assert own.late(survivor.tracked) == ["seen"]
    with pytest.raises(StateError, match="lost rank's `seen` changed after the vote"):
        own.refuse_unknown(other, survivor.tracked)


def test_what_changed_since_a_record_is_named() -> None:
    rank = Rank()
    rank.live(1)
    record = Record.decode(rank.record())
    assert record.drift(rank.tracked) == []
    random.random()
    assert record.drift(rank.tracked) == []

    rank.seen.names.append("after the vote")
    assert record.drift(rank.tracked) == ["seen"]
    rank.model(torch.randn(4, 3))
    rank.model.constant.add_(1)  # type: ignore[operator]
    assert record.drift(rank.tracked) == [
        "model.1.num_batches_tracked",
        "model.1.running_mean",
        "model.1.running_var",
        "model.constant",
        "seen",
    ]


def test_no_record_has_an_empty_digest() -> None:
    assert Record.digest(b"") == ""


@given(st.data())
def test_a_record_with_any_byte_changed_is_refused(data: st.DataObject) -> None:
    record = bytearray(RECORD)
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))

    with pytest.raises(StateError, match="damaged"):
        Record.decode(bytes(record))


@given(st.integers(0, 5000))
def test_a_record_cut_short_is_refused(size: int) -> None:
    with pytest.raises(StateError, match="damaged"):
        Record.decode(RECORD[: min(size, len(RECORD) - 1)])


def _some_record() -> bytes:
    rank = Rank()
    rank.live(1)
    return rank.record(Position(0, 0, 0))


RECORD = _some_record()


def test_a_record_for_other_objects_is_refused() -> None:
    rank, other = Rank(), Tracked()
    other.track("model", rank.model)

    with pytest.raises(StateError, match=r"private state of \['seen'\] came for \[\]"):
        Record.decode(rank.record()).restore_private(other)
