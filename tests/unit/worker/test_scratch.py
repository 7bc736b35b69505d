"""A rehearsal's own directory: what is spared, and what happens to open files at the hand-off."""

from __future__ import annotations

import logging
import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest

from support.eventually import eventually
from tmover.worker.detour import Detour
from tmover.worker.scratch import Scratch, Spared, place


@pytest.fixture
def job(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where the job was started."""
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.log").write_text("line 1\n")
    monkeypatch.chdir(job)
    return job


class Rehearsal:
    """One that writes to a directory of its own."""

    def __init__(self, root: pathlib.Path) -> None:
        self.scratch = Scratch(str(root), Spared((), {}))
        self.detour = Detour(self.scratch.overlay)
        self.root = root

    def leave(self, *, keep: bool = False) -> None:
        self.scratch.leave(self.detour, keep=keep)


@pytest.fixture
def rehearsal(job: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Rehearsal]:
    rehearsal = Rehearsal(tmp_path / "scratch")
    yield rehearsal
    rehearsal.detour.remove()


def test_a_log_that_is_open_to_append_goes_on_after_what_the_job_has_written(
    rehearsal: Rehearsal, job: pathlib.Path
) -> None:
    log = (job / "train.log").open("a")
    handler = logging.FileHandler("events.log")
    log.write("rehearsed\n")
    handler.emit(logging.LogRecord("script", 20, "", 0, "rehearsed", None, None))
    log.flush()
    assert (job / "train.log").read_text() == "line 1\nrehearsed\n"
    log.write("rehearsed, and not yet written out\n")

    rehearsal.leave()
    log.write("line 2\n")
    handler.emit(logging.LogRecord("script", 20, "", 0, "event 2", None, None))
    log.close()
    handler.close()

    assert (job / "train.log").read_text() == "line 1\nline 2\n"
    assert (job / "events.log").read_text() == "event 2\n"
    eventually(lambda: not rehearsal.root.exists())


def test_a_file_that_is_open_to_be_written_anew_stays_and_that_is_said(
    rehearsal: Rehearsal, job: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (job / "train.log").open("w") as log:
        log.write("rehearsed\n")
        rehearsal.leave()
        log.write("line 2\n")

    copy = rehearsal.scratch.overlay.copy_of(str(job / "train.log"))
    assert (job / "train.log").read_text() == "line 1\n"
    assert pathlib.Path(copy).read_text() == "rehearsed\nline 2\n"
    assert f"what is written to it goes to {copy}" in caplog.text


def test_what_is_to_be_kept_is_kept(rehearsal: Rehearsal, job: pathlib.Path) -> None:
    (job / "last.pt").write_text("rehearsed")

    rehearsal.leave(keep=True)

    copy = rehearsal.scratch.overlay.copy_of(str(job / "last.pt"))
    assert pathlib.Path(copy).read_text() == "rehearsed"
    assert not (job / "last.pt").exists()


def test_directories_made_before_the_loop_are_there_after_it_and_no_others(
    rehearsal: Rehearsal, job: pathlib.Path
) -> None:
    os.makedirs("runs/today")
    rehearsal.scratch.looping()
    os.makedirs("runs/today/step_2")

    rehearsal.leave()

    assert [path.name for path in job.rglob("*") if path.is_dir()] == ["runs", "today"]


def test_a_script_stays_in_the_directory_that_it_has_changed_to(
    rehearsal: Rehearsal, job: pathlib.Path
) -> None:
    os.makedirs("runs")
    os.chdir("runs")
    pathlib.Path("config").write_text("rehearsed")

    rehearsal.leave()

    assert os.getcwd() == str(job / "runs")
    assert os.listdir() == []


def test_what_a_killed_process_of_the_same_name_has_left_is_not_seen(
    job: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    left = pathlib.Path(f"{tmp_path}/scratch{job}/train.log")
    left.parent.mkdir(parents=True)
    left.write_text("of another rehearsal")

    rehearsal = Rehearsal(tmp_path / "scratch")
    try:
        assert (job / "train.log").read_text() == "line 1\n"
    finally:
        rehearsal.detour.remove()


def test_temporary_files_and_caches_are_spared_but_not_where_the_job_was_started(
    job: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spared = Spared(("/ours",), {"TRITON_CACHE_DIR": "/shared/triton"})

    for path in ("/dev/shm/x", "/ours/trace/x", "/shared/triton/x", f"{tmp_path}/x"):  # noqa: S108
        assert spared(path)
    for path in (f"{job}/x", "/home/me/x", "/ours-not/x", "/shared/x"):
        assert not spared(path)


def test_a_place_may_be_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_DISK", "/disk")

    assert place("$NODE_DISK/scratch", "slurm7", "n1/0") == "/disk/scratch/slurm7/n1-0"
