"""What is in force while a process rehearses, and that nothing of it is when it does not."""

from __future__ import annotations

import atexit
import builtins
import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tmover.comm.fabric import Fabric
from tmover.config import WorkerConfig
from tmover.errors import ConfigError
from tmover.worker.identity import Identity
from tmover.worker.isolation import Isolation

STANDBY = Identity(job="j", agent="a", local_rank=0, slot=0, nnodes=2, nproc=1, sandbox=True)

Make = Callable[[WorkerConfig], Isolation]


@pytest.fixture
def make() -> Iterator[Make]:
    fabric = Fabric(job="j", secret=b"s" * 32, uid="a/0", address="127.0.0.1")
    made: list[Isolation] = []

    def isolation(settings: WorkerConfig) -> Isolation:
        made.append(Isolation(settings, STANDBY, fabric, ours=None))
        return made[-1]

    yield isolation
    for each in made:
        each.end()
    fabric.close(bye=False)


def replaced() -> list[Any]:
    """Return all that an isolation may replace."""
    of_os = [vars(os)[name] for name in sorted(vars(os)) if callable(vars(os)[name])]
    return [
        *of_os, builtins.open, torch.save, torch.load, atexit.register, dist.TCPStore.__init__,
    ]  # fmt: skip


def test_a_process_that_has_become_a_rank_has_everything_back(
    make: Make, tmp_path: pathlib.Path
) -> None:
    for settings in (WorkerConfig(), WorkerConfig(scratch=str(tmp_path / "scratch"))):
        before = replaced()
        isolation = make(settings)
        isolation.begin()
        assert replaced() != before

        isolation.follow(dataclasses.replace(STANDBY, slot=1))
        assert isolation.active
        isolation.draw()
        isolation.follow(STANDBY.live())

        assert replaced() == before
        assert not isolation.active


def test_a_store_of_the_script_s_own_is_refused(make: Make) -> None:
    make(WorkerConfig()).begin()

    with pytest.raises(ConfigError, match="a rehearsal speaks to no other process"):
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


EXITS = """
import atexit
from tmover.comm.fabric import Fabric
from tmover.config import WorkerConfig
from tmover.worker.identity import Identity
from tmover.worker.isolation import Isolation
identity = Identity(job="j", agent="a", local_rank=0, slot=0, nnodes=2, nproc=1, sandbox=True)
fabric = Fabric(job="j", secret=b"s" * 32, uid="a/0", address="127.0.0.1")
isolation = Isolation(WorkerConfig(), identity, fabric, ours=None)
isolation.begin()
for run in ("first", "second"):
    atexit.register(print, run)
    if run == "first":
        isolation.again()
{then}
fabric.close(bye=False)
"""


@pytest.mark.parametrize(
    ("then", "done"), [("isolation.end()", "second\n"), ("isolation.close()", "")]
)
def test_what_is_to_be_done_at_exit_is_done_once_by_a_rank_and_never_by_a_standby(
    then: str, done: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXITS.format(then=then)], capture_output=True, text=True, check=True
    )

    assert ended.stdout == done


def test_run_again_a_script_finds_nothing_of_what_it_has_written(
    make: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    isolation = make(WorkerConfig(scratch=str(tmp_path / "scratch")))
    isolation.begin()
    pathlib.Path("train.log").write_text("first run")

    isolation.again()

    assert not pathlib.Path("train.log").exists()
    pathlib.Path("train.log").write_text("second run")
    isolation.end()
    assert not pathlib.Path("train.log").exists()


def test_a_directory_that_cannot_be_made_is_named(make: Make, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    isolation = make(WorkerConfig(scratch=str(tmp_path / "file" / "scratch")))

    with pytest.raises(ConfigError, match=r"\[worker\] scratch = .*file/scratch"):
        isolation.begin()

    assert not isolation.active


def test_a_script_that_is_unwound_writes_nothing_with_or_without_a_directory(
    make: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    for settings in (WorkerConfig(), WorkerConfig(scratch=str(tmp_path / "scratch"))):
        isolation = make(settings)
        isolation.begin()
        isolation.draw()
        pathlib.Path("last.pt").write_text("unwound")
        isolation.close()
        isolation.end()

        assert not pathlib.Path("last.pt").exists()
