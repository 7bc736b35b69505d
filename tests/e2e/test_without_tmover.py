"""The same script without a controller: nothing to undo to go back."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from e2e.test_scripts import ASKS, LOOP, NOTHING
from support.training import SCRIPT


def run(*argv: str) -> str:
    done = subprocess.run(
        [sys.executable, *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_runs_by_hand_as_an_ordinary_one() -> None:
    lines = run(str(SCRIPT), "--steps", "3").splitlines()

    assert [line.split()[:2] for line in lines[:-1]] == [["step", str(k)] for k in range(3)]
    assert lines[-1] == "sum of ranks 0.0"


@pytest.fixture
def asks(tmp_path: pathlib.Path) -> str:
    """Return the path of a script that is asked for a checkpoint."""
    script = tmp_path / "asks.py"
    script.write_text(LOOP.format_map({**NOTHING, "between": ASKS}))
    return str(script)


def test_by_hand_a_checkpoint_can_be_asked_for_too(asks: str) -> None:
    assert run(asks) == "saved 3\n"


@pytest.mark.torchrun
def test_under_plain_torchrun_all_ranks_save_after_the_same_step(asks: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")

    assert run(*launcher, "--log-dir", os.devnull, asks) == "saved 3\n" * 3


@pytest.mark.torchrun
def test_the_script_runs_under_plain_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

    lines = run(*launcher, "--log-dir", os.devnull, str(SCRIPT), "--steps", "3").splitlines()

    assert lines[-1] == "sum of ranks 1.0"


TAKEN = """
import torch, tmover
session = tmover.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.track(model=model, optimizer=optimizer)
for step in session.{taken}:
    pass
"""


@pytest.mark.parametrize(
    "taken",
    ["steps([torch.ones(1)], total=2)", pytest.param("final()", marks=pytest.mark.full)],
)
def test_a_step_that_is_taken_without_a_block_is_an_error(
    tmp_path: pathlib.Path, taken: str
) -> None:
    """In a job it would be handed out for ever."""
    script = tmp_path / "taken.py"
    script.write_text(TAKEN.format(taken=taken))

    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )

    assert done.returncode == 1
    assert "was left out: write `with step:`" in done.stderr
