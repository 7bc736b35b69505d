"""A journal that was replaced by a snapshot leads where all of its lines lead."""

from __future__ import annotations

import logging
import pathlib
import shutil
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.faultydisk import Quick
from support.world import World
from tmover.controller.desk import Desk, Ledger
from tmover.controller.journal import Entry, Journal, Settled, Snapshot
from tmover.core.events import AnyEvent, CancelRequested, NodeReady, Submitted
from tmover.core.phase import Stage
from tmover.errors import JournalError, Superseded

SUBMITTED = Submitted(job="1", at=5.0, nnodes=2, nproc=1, owner="ann")


def history(tape: bytes) -> list[AnyEvent]:
    """Return what happened to a simulated job."""
    return [msgspec.structs.replace(each, job="1") for each in World(tape=tape).run().journal]


def feed(desk: Desk, entries: Sequence[Entry]) -> None:
    for entry in entries:
        assert desk.write([entry]) == set()
        desk.take_in(entry)


def settle_first(desk: Desk) -> None:
    """Have the scheduler do the oldest of what it owes."""
    owed = desk.ledgers["1"].effects[:1]
    feed(desk, [Settled(job="1", at=9.0, effect=effect, note="it is done") for effect in owed])


def picture(ledger: Ledger) -> object:
    return ledger.job, ledger.effects, list(ledger.notes), ledger.since, ledger.at


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(tape=st.binary(min_size=200, max_size=600), restarts=st.sets(st.integers(0, 60)))
def test_a_controller_that_replaces_its_journal_knows_what_one_does_that_never_does(
    tmp_path: pathlib.Path, tape: bytes, restarts: set[int]
) -> None:
    shutil.rmtree(tmp_path / "short", ignore_errors=True)
    shutil.rmtree(tmp_path / "long", ignore_errors=True)
    long = Journal(tmp_path / "long", disk=Quick())
    short = Journal(tmp_path / "short", lines=3, size=1, disk=Quick())
    whole, brief = Desk(long), Desk(short)

    for number, event in enumerate(history(tape)):
        for desk in (whole, brief):
            feed(desk, [event])
            if number % 5 == 4:
                settle_first(desk)
            desk.tidy()
        if number in restarts:
            short.close()
            short = Journal(tmp_path / "short", lines=3, size=1, disk=Quick())
            brief = Desk(short)
        assert picture(brief.ledgers["1"]) == picture(whole.ledgers["1"])

    assert (tmp_path / "short" / "1.jsonl.1").exists()
    assert not (tmp_path / "long" / "1.jsonl.1").exists()
    again = Desk(long)
    assert picture(again.ledgers["1"]) == picture(whole.ledgers["1"])
    short.close()
    long.close()


def many(count: int) -> list[Entry]:
    return [NodeReady(job="1", at=float(n), node="node1") for n in range(count)]


def lines_of(path: pathlib.Path) -> int:
    return path.read_bytes().count(b"\n")


def test_a_journal_is_long_by_lines_and_bytes_and_beyond_its_snapshot(
    tmp_path: pathlib.Path,
) -> None:
    journal = Journal(tmp_path, lines=10, size=1, disk=Quick())
    path = tmp_path / "1.jsonl"
    desk = Desk(journal)
    feed(desk, [SUBMITTED, CancelRequested(job="1", reason="x" * 500, at=6.0)])

    feed(desk, many(9))
    desk.tidy()
    assert lines_of(path) == 11, "the first line is not counted: it cannot be less"
    feed(desk, many(1))
    desk.tidy()

    assert lines_of(path) == 1
    assert lines_of(tmp_path / "1.jsonl.1") == 12
    size = path.stat().st_size
    feed(desk, many(11))
    assert path.stat().st_size < 2 * size
    desk.tidy()
    assert lines_of(path) == 12, "it would not be shorter"
    journal.close()


def test_numbers_go_on_after_a_snapshot(tmp_path: pathlib.Path) -> None:
    journal = Journal(tmp_path, disk=Quick())
    journal.append("1", [SUBMITTED, *many(1)])
    journal.replace("1", Snapshot(job="1", state={}))
    journal.append("1", many(1))
    journal.close()

    data = (tmp_path / "1.jsonl").read_bytes()
    lines = [msgspec.json.decode(line) for line in data.splitlines()]

    assert [line["n"] for line in lines] == [3, 4]
    assert [line["entry"]["type"] for line in lines] == ["Snapshot", "NodeReady"]


def test_a_job_that_ended_is_kept_as_what_people_are_shown_of_it(tmp_path: pathlib.Path) -> None:
    journal = Journal(tmp_path, disk=Quick())
    desk = Desk(journal)
    events = history(bytes(range(200)))
    feed(desk, [*events, *many(101)])
    if desk.ledgers["1"].job.phase.stage is not Stage.ENDED:
        feed(desk, [CancelRequested(job="1", reason="enough", at=9e9)])
    while desk.ledgers["1"].effects:
        settle_first(desk)
    notes = list(desk.ledgers["1"].notes)

    desk.tidy()

    ledger = Desk(journal).ledgers["1"]
    assert lines_of(tmp_path / "1.jsonl") == 1
    assert (list(ledger.notes), ledger.job.schemas) == (notes, {})
    assert picture(ledger) == picture(desk.ledgers["1"])
    journal.close()


def test_a_snapshot_that_cannot_be_written_is_put_off_and_said_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, lines=3, size=1, disk=Quick())
    desk = Desk(journal)
    feed(desk, [SUBMITTED, CancelRequested(job="1", reason="x")])
    (tmp_path / "1.jsonl.new").mkdir()

    for event in many(40):
        feed(desk, [event])
        desk.tidy()

    assert caplog.text.count("stays as long as it is") <= 5
    (tmp_path / "1.jsonl.new").rmdir()
    for event in many(60):
        feed(desk, [event])
        desk.tidy()
    assert lines_of(tmp_path / "1.jsonl") < 60
    journal.close()


def test_a_snapshot_this_release_cannot_read_is_refused_with_the_way_out(
    tmp_path: pathlib.Path,
) -> None:
    journal = Journal(tmp_path, disk=Quick())
    journal.append("1", [SUBMITTED])
    journal.replace("1", Snapshot(job="1", state={"name": "1", "shield": 3}))
    path = tmp_path / "1.jsonl"

    with pytest.raises(JournalError) as caught:
        Desk(journal)

    assert str(caught.value).startswith(f"{path}, line 1 is damaged: its snapshot cannot be read")
    assert "this release knows no 'shield'" in str(caught.value)
    assert f"mv {path} {path}.damaged" in str(caught.value)
    journal.close()


def test_jobs_are_in_the_order_they_came_also_after_snapshots(tmp_path: pathlib.Path) -> None:
    journal = Journal(tmp_path, lines=1, size=1, disk=Quick())
    desk = Desk(journal)
    for job, at in (("2", 1.0), ("1", 2.0), ("slurm3", 1.5)):
        submitted = msgspec.structs.replace(SUBMITTED, job=job, at=at)
        feed(desk, [submitted, *(CancelRequested(job=job, at=9.0, reason="x" * 2000),) * 3])
        desk.tidy()

    assert list(Desk(journal).ledgers) == ["2", "slurm3", "1"]
    assert lines_of(tmp_path / "2.jsonl") == 1
    journal.close()


def test_the_journal_is_not_replaced_by_who_is_superseded(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    journal = Journal(tmp_path, lines=1, size=1, disk=Quick())
    desk = Desk(journal)
    feed(desk, [SUBMITTED, *(CancelRequested(job="1", reason="x" * 2000),) * 3])
    before = (tmp_path / "1.jsonl").read_bytes()
    (tmp_path / "claim").write_bytes(b'{"host":"h","pid":1,"boot":"b","run":"other"}')

    with pytest.raises(Superseded):
        desk.tidy()

    assert (tmp_path / "1.jsonl").read_bytes() == before
    journal.close()
