"""`bench/campaign.py` finds small jobs equal whatever is done to them, and repeats itself."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import uuid

import pytest

from support.eventually import eventually
from tmover.process import marked

ROOT = pathlib.Path(__file__).parents[2]
MARK = "CAMPAIGN_TEST"
SEED = 305
KINDS = "ddp,fsdp,hsdp,pp x dp"
FAULTS = 4

pytestmark = pytest.mark.timeout(300)  # a busy machine; alone it takes a minute


def command(file: pathlib.Path, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "bench" / "campaign.py"), "--json", str(file), *options]


def test_a_few_faults_change_no_bit(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "out" / "campaign.json"

    done = subprocess.run(
        command(file, "--faults", str(FAULTS), "--seed", str(SEED), "--kinds", KINDS),
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(file.read_text())
    assert figures["faults"] >= FAULTS
    assert figures == {
        "seed": SEED,
        "runs": figures["runs"],
        "faults": figures["faults"],
        "equal": figures["runs"],
        "lost": 0,
        "repeated": 0,
        "failed_seeds": [],
    }
    assert done.stdout.count(" equal ") >= figures["runs"]


def test_an_interrupted_campaign_leaves_no_process(tmp_path: pathlib.Path) -> None:
    mark = uuid.uuid4().hex
    campaign = subprocess.Popen(
        command(tmp_path / "campaign.json", "--seed", str(SEED)),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
    )
    assert campaign.stdout is not None
    with campaign, campaign.stdout:
        assert f"seed {SEED}" in campaign.stdout.readline()
        campaign.send_signal(signal.SIGINT)

    assert campaign.returncode == 128 + signal.SIGINT
    eventually(lambda: not marked(MARK, mark))


def test_what_is_typed_wrong_is_one_line(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        command(tmp_path / "campaign.json", "--kinds", "gan,nan"),
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert "no such kind: nan; there are ddp, " in done.stderr
