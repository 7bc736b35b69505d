"""What it costs a step to keep copies on another node, and the memory they take; two nodes."""

from __future__ import annotations

import pathlib
import statistics
import tempfile
from typing import NamedTuple

import msgspec

import steps
from sharded import COPIES, NONE
from tmover.cluster import agent_argv

ROUNDS, STEPS = 8, 6
_HERE = pathlib.Path(__file__).parent


class _Report(msgspec.Struct):
    times: dict[str, list[list[float]]]
    host_bytes: int


class Cost(NamedTuple):
    """Of copies after every step, beside none."""

    step_overhead: float
    """Median over the rounds of the median step with copies by that without."""
    host_bytes_per_rank: int
    """Of a rank's own copies and those it keeps for another one."""
    step_s: float
    """The median step without copies."""


def measure(size: str, *, rounds: int = ROUNDS, length: int = STEPS) -> Cost:
    """Run the job; the first round, and each block's first step, are not counted."""
    with tempfile.TemporaryDirectory(prefix="tmover-bench-") as name:
        folder = pathlib.Path(name)
        argv = agent_argv(
            str(_HERE / "sharded.py"),
            *(size, "--folder", name),
            *("--rounds", str(rounds + 1), "--steps", str(length)),
        )
        steps.run(folder, argv, total=2 * (rounds + 1) * length + 1)
        report = msgspec.json.decode((folder / "report.json").read_bytes(), type=_Report)
    medians = {
        kind: [statistics.median(block[1:]) for block in blocks[1:]]
        for kind, blocks in report.times.items()
    }
    pairs = zip(medians[COPIES], medians[NONE], strict=True)
    return Cost(
        step_overhead=statistics.median(a / b for a, b in pairs),
        host_bytes_per_rank=report.host_bytes,
        step_s=statistics.median(medians[NONE]),
    )
