"""Whatever system call a journal is stopped at, nothing is lost that was acknowledged."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.faultydisk import Crash, Data, FaultyDisk, Quick
from tmover.controller.journal import Entry, Journal, Kept, Settled, Snapshot
from tmover.core.events import NodeReady
from tmover.core.orders import EndNode
from tmover.errors import ConfigError, JournalError

STEPS = (2, 1, "replace", 1, "replace", 1, 3)
"""Lines to add at once, or that all are to be replaced."""


def entry(number: int) -> Entry:
    """Return the entry that says so."""
    if number % 3:
        return NodeReady(job="1", at=float(number), node=f"node{number}" * number)
    return Settled(job="1", at=float(number), effect=EndNode(job="1", node="n", reason="x"))


def numbers(kept: list[Kept]) -> list[int]:
    """Return which entries a journal holds, those of its snapshot too."""
    if kept and isinstance(kept[0], Snapshot):
        return [*kept[0].state["entries"], *(int(each.at) for each in kept[1:])]
    return [int(each.at) for each in kept]


class Writer:
    """Does the steps, and knows what was acknowledged and what was begun."""

    def __init__(self) -> None:
        self.acknowledged = self.begun = 0
        self.todo: list[int | str] = list(STEPS)

    def go_on(self, journal: Journal) -> None:
        while self.todo:
            step = self.todo[0]
            if isinstance(step, str):
                known = list(range(1, self.acknowledged + 1))
                journal.replace("1", Snapshot(job="1", state={"entries": known}))
            else:
                last = self.acknowledged + step
                self.begun = max(self.begun, last)
                journal.append("1", [entry(n) for n in range(self.acknowledged + 1, last + 1)])
                self.acknowledged = last
            del self.todo[0]


def crashed(directory: pathlib.Path, at: int) -> tuple[Writer, FaultyDisk]:
    """Return what was done, and the disk, after a crash at that call."""
    writer, disk = Writer(), FaultyDisk(directory, at)
    try:
        journal = Journal(directory, disk=disk)
        writer.go_on(journal)
        journal.close()
    except Crash:
        pass
    return writer, disk


def calls(directory: pathlib.Path) -> range:
    """Return the numbers of all system calls of an undisturbed run."""
    _, disk = crashed(directory, at=10**9)
    disk.cut(Data.ALL, disk.names_changed)
    return range(1, disk.calls + 1)


def check(directory: pathlib.Path, writer: Writer) -> None:
    """Check what the next controller finds, and that it can go on."""
    journal = Journal(directory, disk=Quick())
    try:
        found = numbers(journal.replay("1")) if "1" in journal.jobs() else []
        assert found == list(range(1, len(found) + 1))
        assert writer.acknowledged <= len(found) <= writer.begun
        journal.append("1", [entry(len(found) + 1)])
        assert numbers(journal.replay("1")) == [*found, len(found) + 1]
    finally:
        journal.close()


def test_a_crash_before_any_system_call_loses_nothing_that_was_acknowledged(
    tmp_path: pathlib.Path,
) -> None:
    for at in calls(tmp_path / "whole"):
        for data in Data:
            for part in (0.0, 0.5, 1.0):
                directory = tmp_path / "journal"
                writer, disk = crashed(directory, at)
                assert disk.has_struck

                disk.cut(data, int(part * disk.names_changed))

                check(directory, writer)
                shutil.rmtree(directory)


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_a_system_call_that_fails_is_a_failed_write_and_can_be_made_again(
    tmp_path: pathlib.Path, error: int
) -> None:
    for at in calls(tmp_path / "whole"):
        directory = tmp_path / "journal"
        writer, disk = Writer(), FaultyDisk(directory, at, error)

        journal = finished(directory, writer, disk)

        assert numbers(replayed(journal)) == list(range(1, writer.acknowledged + 1))
        journal.close()
        assert disk.has_struck
        disk.cut(Data.NONE, disk.names_changed)
        check(directory, writer)
        shutil.rmtree(directory)


def replayed(journal: Journal) -> list[Kept]:
    """Return what is there; reading may fail once, too."""
    try:
        return journal.replay("1")
    except JournalError:
        return journal.replay("1")


def finished(directory: pathlib.Path, writer: Writer, disk: FaultyDisk) -> Journal:
    """Try again until all steps are done."""
    journal = None
    for _ in range(3):
        try:
            journal = journal or Journal(directory, disk=disk)
            writer.go_on(journal)
        except (ConfigError, JournalError):
            continue
        return journal
    pytest.fail("it does not come to an end")


def test_a_power_cut_after_a_failed_sync_leaves_only_what_was_synced(
    tmp_path: pathlib.Path,
) -> None:
    """What such a sync leaves in memory is read back as if it were on disk."""
    directory = tmp_path / "journal"
    writer = Writer()
    sync = next(syncs(tmp_path, "1.jsonl"))
    disk = FaultyDisk(directory, sync, errno.EIO)
    journal = Journal(directory, disk=disk)
    with pytest.raises(JournalError):
        writer.go_on(journal)
    assert writer.acknowledged == 0

    writer.go_on(journal)

    disk.cut(Data.NONE, disk.names_changed)
    check(directory, writer)


def syncs(tmp_path: pathlib.Path, name: str) -> Iterator[int]:
    """Yield the numbers of the calls that sync a file of this name."""

    class Listed(FaultyDisk):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            if pathlib.Path(f"/proc/self/fd/{fd}").readlink().name == name:
                found.append(self.calls)

    found: list[int] = []
    disk = Listed(tmp_path / "listed", at=10**9)
    journal = Journal(tmp_path / "listed", disk=disk)
    Writer().go_on(journal)
    journal.close()
    disk.cut(Data.ALL, disk.names_changed)
    yield from found


def test_a_journal_that_lost_lines_while_it_was_closed_is_not_gone_on_with(
    tmp_path: pathlib.Path,
) -> None:
    directory = tmp_path / "journal"
    disk = FaultyDisk(directory, at=10**9)
    journal = Journal(directory, disk=disk)
    journal.append("1", [entry(1), entry(2)])
    path = directory / "1.jsonl"
    good = path.read_bytes()
    disk._at, disk._error = disk.calls + 1, errno.EIO
    with pytest.raises(JournalError, match="cannot write the journal"):
        journal.append("1", [entry(3)])

    for spoilt in (
        b"",
        good[:-2],
        good.splitlines(keepends=True)[0],
        good.replace(b"node1", b"nod"),
    ):
        path.write_bytes(spoilt)
        with pytest.raises(JournalError, match="it has lost lines, or was replaced"):
            journal.append("1", [entry(3)])
    path.unlink()
    with pytest.raises(JournalError, match="No such file"):
        journal.append("1", [entry(3)])
    path.write_bytes(good)
    journal.append("1", [entry(3)])

    assert numbers(journal.replay("1")) == [1, 2, 3]
    journal.close()
    disk.cut(Data.ALL, disk.names_changed)


def test_a_file_that_is_moved_away_while_it_is_written_to_acknowledges_nothing(
    tmp_path: pathlib.Path,
) -> None:
    journal = Journal(tmp_path)
    journal.append("1", [entry(1)])
    path = tmp_path / "1.jsonl"
    path.rename(tmp_path / "1.jsonl.damaged")

    with pytest.raises(JournalError, match="No such file"):
        journal.append("1", [entry(2)])
    (tmp_path / "1.jsonl.damaged").rename(path)
    journal.append("1", [entry(3)])

    assert numbers(journal.replay("1")) == [1, 3]
    journal.close()


KILLED = """
import pathlib, sys
from tmover.controller.journal import Journal, Snapshot
from tmover.core.events import NodeReady

journal = Journal(pathlib.Path(sys.argv[1]))
kept = journal.replay("1") if "1" in journal.jobs() else []
first = kept[0].state["seen"] if kept and isinstance(kept[0], Snapshot) else 0
number = int(kept[-1].at) if kept and kept[-1].at else first
while True:
    number += 1
    print("began", number, flush=True)
    journal.append("1", [NodeReady(job="1", at=float(number), node="n" * (number % 90))])
    print("acknowledged", number, flush=True)
    if number % 7 == 0:
        journal.replace("1", Snapshot(job="1", state={"seen": number}, at=float(number)))
"""


def test_a_process_that_is_killed_at_any_time_has_lost_nothing(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "journal"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    last = {"began": 0, "acknowledged": 0}
    for words in (3, 40, 11, 26, 57):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(directory)],
            env=environ, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for _ in range(words):
                word, number = process.stdout.readline().split()
                last[word] = int(number)
            process.kill()
            for line in process.stdout:
                word, number = line.split()
                last[word] = int(number)
        journal = Journal(directory)
        kept = journal.replay("1")
        found = int(kept[-1].at)
        journal.close()
        assert last["acknowledged"] <= found <= last["began"]
        assert [int(each.at) for each in kept] == list(range(found - len(kept) + 1, found + 1))
