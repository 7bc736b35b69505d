from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tmover.demo.baseline import measure_restarts
from tmover.errors import SchedulerError

TRAINS = """
import argparse, itertools, json, pathlib, time

parser = argparse.ArgumentParser()
for name in ("--steps", "--every", "--checkpoint", "--trace"):
    parser.add_argument(name)
args = parser.parse_args()
checkpoint, every = pathlib.Path(args.checkpoint), int(args.every)
first = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 0
with open(args.trace, "a") as trace:
    for step in itertools.count(first):
        time.sleep(0.01)
        line = {"t": time.monotonic(), "event": "committed", "rank": 0, "step": step}
        print(json.dumps(line), file=trace, flush=True)
        if (step + 1) % every == 0:
            checkpoint.write_text(str(step))
"""


@pytest.mark.torchrun
def test_a_job_killed_between_two_checkpoints_is_measured_to_the_first_step_not_done_before(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    said: list[str] = []

    (restart,) = measure_restarts(script, tmp_path, world=1, kills=1, say=said.append)

    assert restart.steps_redone < 10
    assert restart.pause_s > 0.1, "a process was started in no time"
    assert len(said) == 2


@pytest.mark.torchrun
def test_a_job_that_ends_at_once_is_shown_with_its_log(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no text to train on')")

    with pytest.raises(SchedulerError, match="no text to train on"):
        measure_restarts(script, tmp_path, world=1, kills=1, say=lambda _: None)


@pytest.mark.parametrize("example", ["train_gpt.py", "train_gpt_plain.py"])
def test_the_examples_know_the_flags_that_the_demo_gives_them(example: str) -> None:
    script = pathlib.Path(__file__).parents[3] / "examples" / example

    ended = subprocess.run(
        [sys.executable, script, "--help"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    assert {"--steps", "--checkpoint"} <= set(ended.stdout.split())
