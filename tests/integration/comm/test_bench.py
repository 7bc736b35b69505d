"""`bench/comm.py` runs, writes what it promises, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import uuid
from typing import Any

import pytest

from support.eventually import eventually
from tmover.process import marked

ROOT = pathlib.Path(__file__).parents[3]
MARK = "BENCH_TEST"
DEADLINE_S = 280

pytestmark = pytest.mark.timeout(300)  # a busy machine; alone it takes seconds


def command(*options: str) -> list[str]:
    return [sys.executable, str(ROOT / "bench" / "comm.py"), "--quick", *options]


def figures(file: pathlib.Path, parts: str) -> Any:
    """Run these parts, small; return what was written."""
    done = subprocess.run(
        command("--only", parts, "--json", str(file)),
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def test_the_figures_of_the_communicator_have_their_form(tmp_path: pathlib.Path) -> None:
    found = figures(tmp_path / "out" / "comm.json", "throughput,switch,leaks")

    ops = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "send_recv"}
    assert {point["op"] for point in found["throughput"]} == ops
    for point in found["throughput"]:
        assert type(point["bytes"]) is type(point["world"]) is int
        assert point["ratio_to_gloo"] > 0
    assert found["switch_s"].keys() == {"4"}
    assert found["switch_s"]["4"] > 0
    assert type(found["links_opened_per_stayer"]) is int
    assert found["links_opened_per_stayer"] > 0
    assert type(found["leaks"]["fds"]) is type(found["leaks"]["threads"]) is int
    assert found["leaks"]["rss_ratio"] > 0
    assert found["vote_us"]["2"]["vote"] > 0


def test_a_step_is_compared_with_plain_ddp(tmp_path: pathlib.Path) -> None:
    found = figures(tmp_path / "comm.json", "steps")

    assert found["step_overhead"].keys() == {"demo"}
    assert found["step_overhead"]["demo"] > 0
    assert found["keeper"].keys() == {"demo"}


def test_an_interrupted_run_leaves_no_process(tmp_path: pathlib.Path) -> None:
    mark = uuid.uuid4().hex
    bench = subprocess.Popen(
        command("--only", "throughput", "--json", str(tmp_path / "comm.json")),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
    )
    assert bench.stdout is not None
    with bench, bench.stdout:
        while not bench.stdout.readline().startswith("all_reduce"):
            assert bench.poll() is None
        bench.send_signal(signal.SIGINT)

    assert bench.returncode == 128 + signal.SIGINT
    eventually(lambda: not marked(MARK, mark))
    assert not (tmp_path / "comm.json").exists()
