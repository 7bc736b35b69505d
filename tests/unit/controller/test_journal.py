"""The journal: what was appended is replayed, and damage is seen."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.controller.disk import Disk
from tmover.controller.journal import Entry, Journal, Kept, Settled
from tmover.core.events import Broken, Joined, Submitted
from tmover.core.orders import EndNode
from tmover.errors import ConfigError, JournalError

SUBMITTED = Submitted(job="1", at=1.5, nnodes=2, nproc=1, owner="ann")
JOINED = Joined(
    job="1", at=2.0, agent="node1-aa", node="node1", address="127.0.0.2", nproc=1, standby=False
)
BROKEN = Broken(
    job="1", at=3.0, worker="node1-aa/0", epoch=1, peers=("node2-bb/0",), reason='a\n"break"'
)
SETTLED = Settled(job="1", effect=EndNode(job="1", node="node2", reason="lost"))
ENTRIES: list[Entry] = [SUBMITTED, JOINED, BROKEN, SETTLED]


def written(directory: pathlib.Path) -> pathlib.Path:
    journal = Journal(directory)
    journal.append("1", ENTRIES[:1])
    journal.append("1", ENTRIES[1:])
    journal.close()
    return directory / "1.jsonl"


def replayed(directory: pathlib.Path) -> list[Kept]:
    journal = Journal(directory)
    try:
        return journal.replay("1")
    finally:
        journal.close()


def test_what_was_appended_is_replayed(tmp_path: pathlib.Path) -> None:
    written(tmp_path)

    assert replayed(tmp_path) == ENTRIES


def test_a_journal_goes_on_after_a_restart(tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    journal = Journal(tmp_path)
    journal.replay("1")
    journal.append("1", [BROKEN])
    journal.close()

    assert replayed(tmp_path) == [*ENTRIES, BROKEN]


def test_jobs_are_listed_in_the_order_they_came(tmp_path: pathlib.Path) -> None:
    journal = Journal(tmp_path)
    for job in ("2", "10", "9"):
        journal.append(job, [Submitted(job=job, nnodes=1, nproc=1, owner="ann")])
    (tmp_path / "notes.jsonl").touch()

    assert journal.jobs() == ["2", "9", "10"]
    assert journal.next_id() == "11"
    journal.close()


def test_the_id_of_a_job_that_was_given_up_is_not_used_again(tmp_path: pathlib.Path) -> None:
    written(tmp_path).rename(tmp_path / "1.jsonl.damaged")
    journal = Journal(tmp_path)

    assert journal.jobs() == []
    assert journal.next_id() == "2"
    journal.close()


def test_a_torn_last_line_is_dropped_wherever_it_broke(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    good = whole.rindex(b"\n", 0, -1) + 1

    for end in range(good + 1, len(whole)):
        path.write_bytes(whole[:end])
        journal = Journal(tmp_path)
        assert journal.replay("1") == ENTRIES[:-1]
        journal.append("1", [BROKEN])
        journal.close()
        assert replayed(tmp_path) == [*ENTRIES[:-1], BROKEN]

    assert "dropped the torn last line 4" in caplog.text


def test_a_tail_of_zeros_left_by_a_power_cut_is_dropped(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes() + bytes(4096))

    assert replayed(tmp_path) == ENTRIES


def test_any_other_damage_is_refused_naming_the_line_and_the_way_out(
    tmp_path: pathlib.Path,
) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()

    @given(where=st.integers(0, len(whole) - 2), flip=st.integers(1, 255))
    def is_refused(where: int, flip: int) -> None:
        damaged = bytearray(whole)
        damaged[where] ^= flip
        path.write_bytes(damaged)
        line = damaged[:where].count(b"\n") + 1
        with pytest.raises(JournalError, match=f"line {line} is damaged") as caught:
            replayed(path.parent)
        assert f"mv {path} {path}.damaged" in str(caught.value)

    is_refused()


@pytest.mark.parametrize(
    ("order", "line"), [((0, 2, 3), 2), ((0, 1, 1, 2, 3), 3), ((1, 0, 2, 3), 1)]
)
def test_a_lost_a_doubled_or_a_misplaced_line_is_damage(
    tmp_path: pathlib.Path, order: tuple[int, ...], line: int
) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] for i in order))

    with pytest.raises(JournalError, match=f"line {line} is damaged: it calls itself line"):
        replayed(tmp_path)


def test_the_journal_of_another_job_is_damage(tmp_path: pathlib.Path) -> None:
    written(tmp_path).rename(tmp_path / "2.jsonl")
    journal = Journal(tmp_path)

    with pytest.raises(JournalError, match="line 1 is damaged: it is of job 1"):
        journal.replay("2")
    journal.close()


def test_entries_are_on_disk_before_append_returns(tmp_path: pathlib.Path) -> None:
    on_disk: list[bytes] = []
    path = tmp_path / "1.jsonl"

    class Watched(Disk):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                on_disk.append(path.read_bytes())

    journal = Journal(tmp_path, disk=Watched())

    journal.append("1", [SUBMITTED])

    assert on_disk == [path.read_bytes()] != [b""]
    journal.close()


def test_a_write_that_fails_leaves_nothing_and_can_be_made_again(tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    journal = Journal(tmp_path)
    journal.replay("1")
    size = (tmp_path / "1.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # a disk with 10 bytes left
    try:
        with pytest.raises(JournalError, match=r"cannot write .*1\.jsonl: File too large"):
            journal.append("1", [BROKEN])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.append("1", [SETTLED])
    journal.close()

    assert replayed(tmp_path) == [*ENTRIES, SETTLED]


def test_a_second_controller_on_the_same_journal_is_refused(tmp_path: pathlib.Path) -> None:
    journal = Journal(tmp_path)

    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .*\) works on") as caught:
        Journal(tmp_path)

    assert caught.value.exit_code == 2
    journal.close()
    Journal(tmp_path).close()


def test_a_full_disk_is_one_line_at_the_start_too(tmp_path: pathlib.Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ConfigError, match=r"cannot use .*/claim: file too large"):
            Journal(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_lock_does_not_outlive_a_killed_controller(tmp_path: pathlib.Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from tmover.controller.journal import Journal\n"
        "Journal(pathlib.Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environ, check=False, timeout=60
    )

    assert done.returncode == -9
    Journal(tmp_path).close()


def test_journals_are_for_their_owner_only(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path / "journal")

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_journal_that_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "1.jsonl").mkdir()
    journal = Journal(tmp_path)

    with pytest.raises(JournalError, match=r"cannot read .*1\.jsonl: Is a directory"):
        journal.replay("1")
    journal.close()


def test_a_state_directory_that_is_none_is_a_usage_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "journal").touch()

    with pytest.raises(ConfigError, match="cannot use the directory"):
        Journal(tmp_path / "journal")
