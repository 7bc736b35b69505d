"""What Python's and torch's own functions do while a detour is in force, and that nothing stays."""

from __future__ import annotations

import glob
import logging
import os
import pathlib
import shutil
import sqlite3
import stat
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tmover.worker.detour import Detour
from tmover.worker.overlay import Overlay
from tmover.worker.scratch import Noticing, Spared


@pytest.fixture
def job(tmp_path: pathlib.Path) -> pathlib.Path:
    job = tmp_path / "job"
    (job / "steps").mkdir(parents=True)
    (job / "train.log").write_text("line 1\n")
    (job / "steps" / "1.pt").write_bytes(b"one")
    return job


@pytest.fixture
def scratch(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "scratch"


@pytest.fixture
def redirected(scratch: pathlib.Path, job: pathlib.Path) -> Iterator[Detour]:
    """Everything under the job's directory is redirected."""
    inside = f"{job}/"
    overlay = Overlay(str(scratch), spared=lambda path: not f"{path}/".startswith(inside))
    detour = Detour(overlay)
    yield detour
    detour.remove()


def tree(place: pathlib.Path) -> dict[str, object]:
    """Return all that is under a directory: what it is, when it was changed, what is in it."""
    found: dict[str, object] = {}
    for path in sorted(place.rglob("*")):
        facts = path.lstat()
        is_file = stat.S_ISREG(facts.st_mode)
        changed = facts.st_mtime_ns if is_file else 0
        contents = path.read_bytes() if is_file else b""
        found[str(path.relative_to(place))] = (facts.st_mode, facts.st_nlink, changed, contents)
    return found


def scripted() -> Any:
    return torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))  # type: ignore[no-untyped-call]


def rewrite(path: pathlib.Path) -> None:
    path.write_text("rehearsed")


def with_os_open(path: pathlib.Path) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(number, b"rehearsed")
    os.close(number)


def by_name_in_directory(path: pathlib.Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY)
    number = os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd=directory)
    os.write(number, b"rehearsed")
    os.close(number)
    os.close(directory)


def through_a_draft(path: pathlib.Path) -> None:
    draft = path.with_suffix(".draft")
    with draft.open("x") as file:
        file.write("rehearsed")
    draft.replace(path)


def with_a_log_handler(path: pathlib.Path) -> None:
    handler = logging.FileHandler(path)
    handler.emit(logging.LogRecord("script", 20, "", 0, "rehearsed", None, None))
    handler.close()


def with_a_data_base(path: pathlib.Path) -> None:
    path.unlink()
    base = sqlite3.connect(path)
    base.execute("create table metrics (loss real)")
    base.commit()
    base.close()


@pytest.mark.parametrize(
    "write",
    [
        rewrite,
        with_os_open,
        by_name_in_directory,
        through_a_draft,
        with_a_log_handler,
        with_a_data_base,
        lambda path: torch.save({"step": 3}, path),
        lambda path: torch.save({"step": 3}, str(path), _use_new_zipfile_serialization=False),
        lambda path: torch.jit.save(scripted(), path),
        lambda path: np.save(path, np.ones(3)),
        lambda path: np.ones(3).tofile(path),
        lambda path: np.memmap(path, mode="w+", shape=(3,)).flush(),
        lambda path: shutil.copy(path.parent / "steps" / "1.pt", path),
        lambda path: shutil.move(path, path.parent / "moved"),
        lambda path: shutil.rmtree(path.parent / "steps"),
        lambda path: os.truncate(path, 0),
        lambda path: os.utime(path, (1, 1)),
        lambda path: path.chmod(0o600),
        lambda path: path.unlink(),
        lambda path: (path.parent / "a" / "b").mkdir(parents=True),
        lambda path: os.makedirs(path.parent / "steps" / "2", exist_ok=True),
        lambda path: (path.parent / "latest").symlink_to("steps"),
        lambda path: os.link(path, path.parent / "hard"),
        lambda path: os.rename(path.parent / "steps", path.parent / "kept"),
    ],
)
def test_the_job_s_files_stay_as_they_are(
    redirected: Detour, job: pathlib.Path, write: object
) -> None:
    assert callable(write)
    before = tree(job)

    write(job / "train.log")
    shown = tree(job)
    redirected.remove()

    assert shown != before, "the script does not see what it has done"
    assert tree(job) == before


def test_what_was_written_is_found_in_every_way(redirected: Detour, job: pathlib.Path) -> None:
    torch.save({"step": 2}, job / "steps" / "2.pt")

    assert os.path.exists(job / "steps" / "2.pt")
    assert (job / "steps" / "2.pt").is_file()
    assert sorted(os.listdir(job / "steps")) == ["1.pt", "2.pt"]
    assert os.listdir(os.fsencode(job / "steps")) == [b"1.pt", b"2.pt"]
    assert sorted(glob.glob(f"{job}/**/*.pt", recursive=True)) == [
        f"{job}/steps/1.pt",
        f"{job}/steps/2.pt",
    ]
    assert {path.name for path in job.rglob("*.pt")} == {"1.pt", "2.pt"}
    with os.scandir(job / "steps") as entries:
        assert {entry.path: entry.is_file() for entry in entries} == {
            f"{job}/steps/1.pt": True,
            f"{job}/steps/2.pt": True,
        }
    assert torch.load(job / "steps" / "2.pt") == {"step": 2}
    assert (job / "steps" / "1.pt").read_bytes() == b"one"


def test_a_relative_name_and_a_changed_directory_lead_there_too(
    redirected: Detour, job: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job)
    pathlib.Path("new").write_text("rehearsed")
    (job / "steps" / "3.pt").write_text("rehearsed")
    os.chdir("steps")

    assert sorted(os.listdir()) == ["1.pt", "3.pt"]
    assert pathlib.Path("../new").read_text() == "rehearsed"
    assert not os.path.lexists(os.readlink("/proc/self/cwd") + "/../new/none")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_of_checkpoints_is_written_there(redirected: Detour, job: pathlib.Path) -> None:

    state = {"weight": torch.ones(3)}
    dcp.save(state, checkpoint_id=job / "steps" / "2", no_dist=True)
    loaded = {"weight": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=job / "steps" / "2", no_dist=True)

    assert torch.equal(loaded["weight"], torch.ones(3))
    redirected.remove()
    assert sorted(path.name for path in job.rglob("*")) == ["1.pt", "steps", "train.log"]


def test_everything_is_put_back(job: pathlib.Path, tmp_path: pathlib.Path) -> None:
    kept = types.ModuleType("script_that_names_functions")
    exec("from os import rename, stat\nfrom torch import save", vars(kept))  # noqa: S102
    before = {name: value for name, value in vars(os).items() if callable(value)}
    opened, saved, loaded = open, torch.save, torch.load
    sys.modules[kept.__name__] = kept
    try:
        detour = Detour(Overlay(str(tmp_path / "scratch"), spared=bool))
        assert kept.__dict__["rename"] is os.rename
        assert os.rename is not before["rename"]
        assert kept.__dict__["save"] is not saved
        exec("from os import replace", vars(kept))  # noqa: S102 - known since the detour is there
        hidden = os.replace
        detour.remove()
    finally:
        del sys.modules[kept.__name__]

    assert {name: value for name, value in vars(os).items() if callable(value)} == before
    assert (open, torch.save, torch.load) == (opened, saved, loaded)
    for name in ("rename", "stat", "replace"):
        assert vars(kept)[name] is before[name]
    hidden(job / "train.log", job / "moved")  # whoever has kept a replacement does as ever
    assert (job / "moved").read_text() == "line 1\n"


def test_after_a_survey_what_has_changed_since_is_put_back_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("knew", "learns", "comes", "knows_none")
    knew, learns, comes, knows_none = (types.ModuleType(name) for name in names)
    exec("from os import rename", vars(knew))  # noqa: S102
    knows_none.__dict__["rename"] = None
    for module in (knew, learns, knows_none):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    rename, opened = os.rename, open
    detour = Detour(Overlay(str(tmp_path / "scratch"), spared=bool))
    try:
        detour.survey()
        hidden = os.rename
        for module in (learns, comes, knows_none):
            vars(module)["rename"] = hidden
        monkeypatch.setitem(sys.modules, comes.__name__, comes)
    finally:
        detour.remove()

    assert (os.rename, open) == (rename, opened)
    for module in (knew, learns, comes):
        assert vars(module)["rename"] is rename
    assert vars(knows_none)["rename"] is hidden  # not looked through again: calls on what it was


def test_without_a_directory_what_is_written_is_written_and_said_once(
    job: pathlib.Path,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(job)  # which is under the temporary directory, as a job's may be
    detour = Detour(Noticing(Spared((str(tmp_path / "trace"),), {})), reads=False)
    try:
        for _ in range(3):
            with open("train.log", "a") as log:
                log.write("line 2\n")
        (tmp_path / "trace").write_text("ours")
        os.makedirs(job / "steps", exist_ok=True)
        for number in range(9):
            (job / "steps" / str(number)).write_text("")
    finally:
        detour.remove()

    assert (job / "train.log").read_text() == "line 1\n" + 3 * "line 2\n"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 6
    assert f"the rehearsal writes {job}/train.log, which the job writes too" in said[0]
    assert "more files" in said[-1]
