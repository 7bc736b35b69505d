"""What a training step costs under tmover, beside plain DDP on gloo; two nodes of one rank each.

A whole job on this machine: controller, agents, torchrun, workers. See `training.py` for what it
does, and how the two take turns.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import psutil

import progress
from tmover.cluster import JobSpec, LocalCluster, agent_argv
from tmover.config import load
from tmover.demo.show import impatient
from tmover.process import descendants
from training import ALONE, GLOO, TMOVER

WORLD = 2
ROUNDS = {"demo": 30, "50m": 10}
STEPS = {"demo": 20, "50m": 4}
_POLL_S = 1.0
_Times = dict[str, list[list[float]]]
_HERE = pathlib.Path(__file__).parent


class Overhead(NamedTuple):
    """The median step of one model, in seconds, and what it is beside plain DDP's."""

    tmover_s: float
    gloo_s: float
    without_keeper_s: float
    ratio: float
    """Median over the rounds of the median step under tmover by that of plain DDP."""
    ratio_without_keeper: float
    """The same while no records go to a keeper."""
    keeper_share: float
    """What the keeper adds to a step, by plain DDP's step."""
    beside_share: float
    """CPU time of controller, agents and torchruns by wall time: in none of the ratios."""


def measure(model: str, *, rounds: int, steps: int, size: str | None = None) -> Overhead:
    """Run the job; the first round, and each block's first step, are not counted."""
    with tempfile.TemporaryDirectory(prefix="tmover-bench-") as name:
        folder = pathlib.Path(name)
        argv = agent_argv(
            str(_HERE / "training.py"),
            *(size or model, "--folder", name),
            *("--rounds", str(rounds + 1), "--steps", str(steps)),
        )
        beside_share = run(folder, argv, total=2 * (rounds + 1) * steps)
        times = msgspec.json.decode((folder / "report.json").read_bytes(), type=_Times)
    medians = {
        kind: [statistics.median(block[1:]) for block in blocks[1:]]
        for kind, blocks in times.items()
    }
    plain = medians[GLOO]
    with_keeper, without = _ratio(medians[TMOVER], plain), _ratio(medians[ALONE], plain)
    return Overhead(
        tmover_s=statistics.median(medians[TMOVER]),
        gloo_s=statistics.median(plain),
        without_keeper_s=statistics.median(medians[ALONE]),
        ratio=with_keeper,
        ratio_without_keeper=without,
        keeper_share=with_keeper - without,
        beside_share=beside_share,
    )


def _ratio(times: Iterable[float], others: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def run(folder: pathlib.Path, argv: tuple[str, ...], *, total: int) -> float:
    """Run the job to its end; return the share of a core that was used beside its workers."""
    scratch = folder / "tmp"  # a torchrun that is killed leaves files
    scratch.mkdir()
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_HERE.parent / "src"),
        "TMPDIR": str(scratch),
    }
    spec = JobSpec(nodes=WORLD, standby=0, nproc=1, argv=argv, env=env, cwd=pathlib.Path.cwd())
    with LocalCluster(folder / "state", impatient(load())) as cluster:
        job = cluster.submit(spec)
        beside = _Beside(cluster)
        while (status := cluster.status(job)).code is None:
            progress.show(status.step or 0, total, "step")
            if status.step:
                beside.read()
            time.sleep(_POLL_S)
        progress.show(total, total, "step")
        if status.code != 0:
            logs = [file.read_text(errors="replace") for file in cluster.logs(job).iterdir()]
            msg = "\n".join([f"the job that was to be measured failed: {status.outcome}", *logs])
            raise SystemExit(msg)
    return beside.share()


class _Beside:
    """The CPU time of what tmover runs beside its workers: controller, agents, torchruns."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._readings: list[tuple[float, float]] = []

    def read(self) -> None:
        """Note what they have used so far, unless they are about to end."""
        cluster = self._cluster
        roots = [cluster.scheduler.holder(node.name) for node in cluster.scheduler.nodes()]
        known = {*descendants(*(root.pid for root in roots if root is not None))}
        controller = cluster.controller()
        pids = [each.pid for each in known] + ([controller.pid] if controller else [])
        with contextlib.suppress(psutil.Error):
            processes = [psutil.Process(pid) for pid in pids]
            used = [sum(p.cpu_times()[:2]) for p in processes if not _is_worker(p)]
            if len(processes) - len(used) == WORLD:
                self._readings.append((time.monotonic(), sum(used)))

    def share(self) -> float:
        """Return their part of one core between the first and the last reading."""
        if len(self._readings) < 2:
            return 0.0
        (begin, before), (end, after) = self._readings[0], self._readings[-1]
        return (after - before) / (end - begin)


def _is_worker(process: psutil.Process) -> bool:
    return "tmover.worker" in process.cmdline()
