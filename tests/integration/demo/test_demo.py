from __future__ import annotations

import io
import json
import pathlib
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from tmover.cluster import LocalCluster
from tmover.demo import measure, runs
from tmover.demo.screen import Screen
from tmover.demo.show import find_examples

DEMO = [sys.executable, "-m", "tmover", "demo"]


@pytest.mark.timeout(400)
def test_both_interruptions_of_the_moved_run_are_found_in_its_trace(cluster: LocalCluster) -> None:
    script = find_examples() / "train_gpt.py"

    with Screen(Console(file=io.StringIO())) as screen:
        moved = runs.moved(cluster, screen, script, 300)

    assert {line.rank for line in moved.lines if line.digest} == set(range(runs.NODES))
    planned, failure = (
        measure.move(moved.lines, kind=one.kind, slot=one.slot, at=one.at)
        for one in moved.interruptions
    )
    assert (planned.kind, planned.slot, planned.steps_redone) == ("planned", 2, 0)
    assert (failure.kind, failure.slot) == ("failure", 0)
    assert failure.steps_redone <= 1


@pytest.mark.torchrun
def test_ctrl_c_leaves_nothing_behind() -> None:
    with subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert "a standby start" in demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate()

    assert (demo.returncode, errors.strip()) == (130, "interrupted")


@pytest.mark.full
@pytest.mark.torchrun
@pytest.mark.timeout(600)
def test_the_whole_demo_meets_its_bars(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "demo.json"

    shown = subprocess.run([*DEMO, "--json", str(file)], capture_output=True, text=True)

    assert shown.returncode == 0, shown.stderr
    report = json.loads(file.read_bytes())
    assert report["equal"]
    assert report["samples"] == {"lost": 0, "repeated": 0}
    planned, failure = report["moves"]
    assert planned["steps_redone"] == 0
    assert failure["steps_redone"] <= 1
    assert report["restart"]["pause_s"] >= 50 * planned["pause_s"]
    assert report["restart"]["pause_s"] >= 25 * failure["pause_s"]
    for move in report["moves"]:
        assert move["phases_s"]["first_step"] <= 1.5 * report["step_s"]
