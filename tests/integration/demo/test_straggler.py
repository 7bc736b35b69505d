"""The example of a node that becomes slow: run as a person would, it shows what it says it does."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tmover.demo.show import find_examples

SLOWER_S = 0.5
"""Far more than a step takes."""


@pytest.mark.full
@pytest.mark.torchrun
@pytest.mark.timeout(400)
def test_the_slow_node_is_replaced_and_the_job_is_as_fast_as_before(tmp_path: pathlib.Path) -> None:
    report = tmp_path / "report.json"

    shown = subprocess.run(
        [
            *(sys.executable, str(find_examples() / "straggler.py")),
            *("--steps", "250", "--slow-at", "30"),
            *("--seconds", str(SLOWER_S), "--json", str(report)),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout

    found = json.loads(report.read_text())
    assert "node2 has left: its ranks train on node4" in shown
    assert "slowed" in shown
    assert 0 < found["slowed"] <= 1 / SLOWER_S
    assert found["after"] > found["slowed"]
    assert found["before"] > found["slowed"]
