"""What a node runs, told to another job's standby and taken over by it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest

from tmover import wire
from tmover.agent import programs
from tmover.agent.launcher import WorkerCommand
from tmover.core.events import Joined
from tmover.errors import Refused

JOINED = Joined(job="1", agent="n1-a", node="n1", address="x", nproc=2, standby=False)
COMMAND = WorkerCommand(nproc=2, script="train.py", arguments=("--lr", "1"), flags=("--tee", "3"))


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Put back what a test takes out of the environment, too."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> wire.Program:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("MINE", "1")
    return programs.describe(JOINED, COMMAND)


def changed(program: wire.Program, **env: str) -> wire.Program:
    return wire.Program(
        job="2", agent="x", script="b.py", cwd=program.cwd, env={**program.env, **env},
        flags=program.flags,
    )  # fmt: skip


def test_it_says_what_is_run_where_and_leaves_out_what_is_the_nodes_own(
    program: wire.Program, tmp_path: pathlib.Path
) -> None:
    assert (program.script, program.arguments, program.flags) == (
        "train.py", ("--lr", "1"), ("--tee", "3"),
    )  # fmt: skip
    assert program.cwd == str(tmp_path)
    assert program.env["MINE"] == "1"
    assert "SLURM_JOB_ID" not in program.env


def test_its_environment_is_not_in_what_a_log_shows(program: wire.Program) -> None:
    assert "MINE" not in repr(program)
    assert "MINE" not in repr(
        wire.Greeting(job="2", agent="x", boot="b", secret=b"", program=program)
    )


def test_processes_are_alike_unless_the_environment_differs_in_what_libraries_may_read(
    program: wire.Program,
) -> None:
    assert programs.is_alike(program, changed(program, TMOVER_TRACE="/elsewhere"))
    assert not programs.is_alike(program, changed(program, OMP_NUM_THREADS="64"))
    assert not programs.is_alike(program, changed(program, MINE="2"))


def test_taken_over_it_is_what_is_run_from_now_on(
    program: wire.Program, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    other = wire.Program(
        job="2", agent="x", script="b.py", arguments=("7",), cwd=str(there),
        env={**{k: v for k, v in program.env.items() if k != "MINE"}, "THEIRS": "2"},
    )  # fmt: skip
    monkeypatch.setenv("THEIRS", "")
    monkeypatch.setenv("TMOVER_JOB", "1")

    command = programs.take_over(other, 2)

    assert command == WorkerCommand(nproc=2, script="b.py", arguments=("7",))
    assert pathlib.Path.cwd() == there
    assert os.environ["THEIRS"] == "2"
    assert "MINE" not in os.environ
    assert os.environ["TMOVER_JOB"] == "2"
    assert os.environ["SLURM_JOB_ID"] == "7"


def test_a_directory_that_is_not_on_this_node_is_refused(program: wire.Program) -> None:
    gone = wire.Program(job="2", agent="x", script="b.py", cwd="/not/there", env={})

    with pytest.raises(Refused, match="job 2 runs in /not/there, which is not on this node"):
        programs.take_over(gone, 2)
    assert os.environ["MINE"] == "1"
