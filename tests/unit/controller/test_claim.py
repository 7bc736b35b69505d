"""Only one controller works on the journals, also where locks do not hold between machines."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from support.eventually import eventually
from tmover.controller.claim import CLAIM, LAST, Claim, Holder, find, last_heard
from tmover.controller.disk import Disk
from tmover.controller.journal import Journal
from tmover.core.events import NodeReady
from tmover.errors import ConfigError, JournalError, Superseded

READY = NodeReady(job="1", node="n")


class NoLocks(Disk):
    """A file system that keeps no locks."""

    def lock(self, fd: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def on_other_machine(directory: pathlib.Path, *, ago_s: float = 0.0, claim_s: float = 10.0) -> None:
    """Leave the claim of a controller that was heard of so long ago on another machine."""
    holder = Holder(host="head2", pid=7, boot="other", run="r", lock=1, claim_s=claim_s)
    path = directory / CLAIM
    path.write_bytes(msgspec.json.encode(holder))
    then = path.stat().st_mtime - ago_s
    os.utime(path, (then, then))


def holder(directory: pathlib.Path) -> Holder:
    found = find(directory, Disk())
    assert found is not None
    return found.holder


def test_a_fresh_claim_of_another_machine_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    on_other_machine(tmp_path, ago_s=9.0)

    with pytest.raises(ConfigError) as caught:
        Journal(tmp_path)

    said = r"another controller \(process 7 on head2, heard of (9|10)\.\d s ago\) works on "
    assert re.match(said, str(caught.value))
    assert str(caught.value).endswith("; if it is dead, start again 10 s after it was heard of")
    assert caught.value.exit_code == 2
    assert holder(tmp_path).host == "head2"


@pytest.mark.parametrize("disk", [Disk(), NoLocks()])
def test_one_that_is_over_is_taken(tmp_path: pathlib.Path, disk: Disk) -> None:
    on_other_machine(tmp_path, ago_s=11.0, claim_s=0.05)

    journal = Journal(tmp_path, disk=disk)

    assert holder(tmp_path).pid == os.getpid()
    journal.append("1", [READY])
    journal.close()


def test_without_locks_the_claim_alone_keeps_a_second_one_off(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, disk=NoLocks())
    assert "cannot be locked (No locks available)" in caplog.text

    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .*, heard of"):
        Journal(tmp_path, disk=NoLocks())

    journal.close()
    Journal(tmp_path, disk=NoLocks()).close()


def test_a_claim_that_was_given_back_is_no_claim_and_says_when(tmp_path: pathlib.Path) -> None:
    assert last_heard(tmp_path) is None
    journal = Journal(tmp_path)
    assert last_heard(tmp_path) == (tmp_path / CLAIM).stat().st_mtime

    journal.close()

    assert not (tmp_path / CLAIM).exists()
    assert last_heard(tmp_path) == (tmp_path / LAST).stat().st_mtime
    assert sorted(path.name for path in tmp_path.iterdir()) == [LAST, "lock"]


def test_it_is_renewed(tmp_path: pathlib.Path) -> None:
    journal = Journal(tmp_path)
    os.utime(tmp_path / CLAIM, (1.0, 1.0))

    journal.renew()

    assert (tmp_path / CLAIM).stat().st_mtime > 1.0
    journal.close()


def test_whoever_is_superseded_writes_nothing_that_counts(tmp_path: pathlib.Path) -> None:
    journal = Journal(tmp_path)
    journal.append("1", [READY])
    before = (tmp_path / "1.jsonl").read_bytes()
    on_other_machine(tmp_path)

    with pytest.raises(Superseded, match=r"another controller \(process 7 on head2\) has taken"):
        journal.renew()
    with pytest.raises(Superseded) as caught:
        journal.append("1", [READY])

    assert caught.value.exit_code == 1
    journal.close()
    assert holder(tmp_path).host == "head2", "it is not given back by who does not have it"
    assert (tmp_path / "1.jsonl").read_bytes().startswith(before)


def test_whoever_has_not_looked_for_a_while_does_so_before_it_writes(
    tmp_path: pathlib.Path,
) -> None:
    journal = Journal(tmp_path, claim_s=1e-6)
    journal.append("1", [READY])
    before = (tmp_path / "1.jsonl").read_bytes()
    on_other_machine(tmp_path)

    with pytest.raises(Superseded):
        journal.append("1", [READY])

    assert (tmp_path / "1.jsonl").read_bytes() == before
    journal.close()


def test_a_claim_that_somebody_removed_is_put_back(tmp_path: pathlib.Path) -> None:
    journal = Journal(tmp_path)
    mine = holder(tmp_path)
    (tmp_path / CLAIM).unlink()

    journal.renew()

    assert holder(tmp_path) == mine
    journal.close()


def test_a_claim_that_cannot_be_read_is_a_failed_write(tmp_path: pathlib.Path) -> None:
    journal = Journal(tmp_path)
    mine = (tmp_path / CLAIM).read_bytes()
    (tmp_path / CLAIM).write_bytes(b"{")

    with pytest.raises(JournalError, match=r"cannot tell whether .*claim is still ours"):
        journal.append("1", [READY])
    with pytest.raises(ConfigError, match="If no controller works here, remove it"):
        Claim(tmp_path, NoLocks(), 10.0)
    (tmp_path / CLAIM).write_bytes(mine)
    journal.append("1", [READY])

    assert journal.replay("1") == [READY]
    journal.close()


def test_who_is_taken_over_writes_into_a_file_that_nobody_reads(tmp_path: pathlib.Path) -> None:
    """It may be frozen in the midst of a write, and go on with it when another one works."""
    before = Journal(tmp_path)
    before.append("1", [READY])
    kept = (tmp_path / "1.jsonl").open("ab")
    on_other_machine(tmp_path, ago_s=11.0, claim_s=0.05)
    (tmp_path / "lock").rename(tmp_path / "lock.before")
    after = Journal(tmp_path, claim_s=0.05)
    assert after.replay("1") == [READY]

    with kept:
        kept.write(b"what was held up\n")

    assert after.replay("1") == [READY]
    after.append("1", [READY])
    assert after.replay("1") == [READY, READY]
    before.close()
    after.close()


HELD = """
import pathlib, sys
from tmover.controller.journal import Journal
from tmover.core.events import NodeReady
from tmover.errors import TmoverError

number = 0
try:
    journal = Journal(pathlib.Path(sys.argv[1]), claim_s=float(sys.argv[2]))
    journal.replay("1") if "1" in journal.jobs() else []
    print("holds", flush=True)
    for line in sys.stdin:
        if line == "renew\\n":
            journal.renew()
        else:
            journal.append("1", [NodeReady(job="1", node=line.strip())])
        print("did", line, end="", flush=True)
except TmoverError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


class Process:
    """A controller's journal in a process of its own."""

    def __init__(self, directory: pathlib.Path, claim_s: float) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.popen = subprocess.Popen(
            [sys.executable, "-c", HELD, str(directory), str(claim_s)],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.first = self.hear()

    def hear(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def tell(self, line: str) -> str:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()
        return self.hear()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.popen.kill()
        process.popen.communicate()


def test_of_two_processes_that_locks_do_not_keep_apart_one_works(
    tmp_path: pathlib.Path, processes: list[Process]
) -> None:
    directory = tmp_path / "journal"
    first = Process(directory, claim_s=30.0)
    processes.append(first)
    assert first.tell("node1") == "did node1"
    (directory / "lock").unlink()  # now each has a lock of its own

    second = Process(directory, claim_s=30.0)
    processes.append(second)

    assert second.first.startswith(f"another controller (process {first.popen.pid} on ")
    assert second.popen.wait(30) == 2
    assert first.tell("node2") == "did node2"


def test_a_controller_that_was_stopped_for_long_ends_before_it_writes(
    tmp_path: pathlib.Path, processes: list[Process]
) -> None:
    directory = tmp_path / "journal"
    first = Process(directory, claim_s=0.2)
    processes.append(first)
    assert first.tell("node1") == "did node1"
    assert first.tell("renew") == "did renew"
    first.popen.send_signal(signal.SIGSTOP)
    (directory / "lock").unlink()

    def started() -> Process | None:
        process = Process(directory, claim_s=0.2)
        processes.append(process)
        return process if process.first == "holds" else None

    second = eventually(started)
    assert second is not None
    assert second.tell("node2") == "did node2"
    first.popen.send_signal(signal.SIGCONT)

    assert f"(process {second.popen.pid} on " in first.tell("node3")
    assert first.popen.wait(30) == 1
    assert second.tell("node4") == "did node4"
    second.popen.kill()
    second.popen.wait()
    journal = Journal(directory)
    nodes = [entry.node for entry in journal.replay("1") if isinstance(entry, NodeReady)]
    journal.close()
    assert nodes == ["node1", "node2", "node4"]
