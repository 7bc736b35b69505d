"""The same script without a controller: nothing to undo to go back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.training import SCRIPT


def run(*argv: str) -> str:
    done = subprocess.run(
        [sys.executable, *argv, str(SCRIPT), "--steps", "3"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_runs_by_hand_as_an_ordinary_one() -> None:
    lines = run().splitlines()

    assert [line.split()[:2] for line in lines[:-1]] == [["step", str(k)] for k in range(3)]
    assert lines[-1] == "sum of ranks 0.0"


@pytest.mark.torchrun
def test_the_script_runs_under_plain_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

    lines = run(*launcher, "--log-dir", os.devnull).splitlines()

    assert lines[-1] == "sum of ranks 1.0"
