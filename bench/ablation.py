"""What each part of a move is worth: `make bench-ablation`, after figure 15 of the paper.

    python bench/ablation.py --moves 10

Four ways to replace a node of the same job, each without what the next one adds: the job started
again from its checkpoint; survivors that wait for a node with their state; a standby whose links
are prepared, but that has computed nothing; one that has rehearsed. Then a joiner's first step,
by the steady step of the same job with its standby at rest: warm and cold, eager and compiled.
A figure that could not be measured is null, and the reason is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

import progress
from tmover import wire
from tmover.cluster import JobSpec, LocalCluster, agent_argv
from tmover.config import load
from tmover.demo import measure
from tmover.demo.baseline import measure_restarts
from tmover.demo.show import find_examples, impatient
from tmover.demo.trace import Line, read
from tmover.errors import TmoverError

OUT = pathlib.Path(__file__).parent / "out" / "ablation.json"
HERE = pathlib.Path(__file__).parent
WORLD = 3
STEADY = 30
"""Steps that are looked at, before each move, for the steady one."""
PATIENCE_S = 300.0
_POLL_S = 0.05
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass
class Figures:
    """Of one kind of replacement: pauses, first steps and steady steps, in seconds."""

    pauses: list[float] = dataclasses.field(default_factory=list)
    ratios: list[float] = dataclasses.field(default_factory=list)
    firsts: list[float] = dataclasses.field(default_factory=list)
    steadies: list[float] = dataclasses.field(default_factory=list)


class Bench:
    """One job, whose nodes are replaced one after the other."""

    def __init__(self, cluster: LocalCluster, name: str, *flags: str, standby: int) -> None:
        self.cluster, self.name = cluster, name
        self._trace = cluster.state / "trace" / name
        scratch = cluster.state / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE.parent / "src"),
            "TMOVER_TRACE": str(self._trace),
            "TMPDIR": str(scratch),
        }
        gate = ("--until", str(scratch / "over"))
        argv = agent_argv(str(HERE / "ablated.py"), *gate, *flags)
        spec = JobSpec(
            nodes=WORLD, standby=standby, nproc=1, argv=argv, env=env, cwd=pathlib.Path.cwd()
        )
        self.job = cluster.submit(spec)

    def until(self, due: Callable[[wire.JobStatus], bool]) -> wire.JobStatus:
        return self.cluster.wait(self.job, due, timeout_s=PATIENCE_S)

    def lines(self) -> list[Line]:
        return read(self._trace)

    def train_for(self, steps: int) -> None:
        """Wait until rank 0 has done so many steps more."""
        aim = _done(self.lines()) + steps
        deadline = time.monotonic() + PATIENCE_S
        while _done(self.lines()) < aim:
            if time.monotonic() > deadline:
                msg = f"{self.name}: no {steps} steps within {PATIENCE_S:g} s"
                raise TmoverError(msg)
            time.sleep(_POLL_S)

    def rest(self, slot: int) -> None:
        """Wait until a standby can take the slot as it is."""
        self.until(
            lambda status: (
                status.phase == "training"
                and any(s.state == "warm" and slot in s.takes for s in status.standbys)
            )
        )

    def move(self, slot: int, figures: Figures) -> None:
        """Move a slot to the standby that rests, and note what it took."""
        self.rest(slot)
        began = time.monotonic()
        self.train_for(STEADY)
        at = time.monotonic()
        node = self.until(lambda _: True).slots[slot].node
        self.cluster.move(self.job, node, "it is measured")
        self._note(slot, node, at, began, "planned", figures)

    def lose(self, slot: int, figures: Figures) -> None:
        """Cut a slot's node off its power, and note what it took."""
        began = time.monotonic()
        self.train_for(STEADY)
        node = self.until(lambda _: True).slots[slot].node
        at = self.cluster.fail_node(node)
        self._note(slot, node, at, began, "failure", figures)

    def _note(
        self, slot: int, node: str, at: float, began: float, kind: Any, figures: Figures
    ) -> None:
        self.until(
            lambda status: status.phase == "training" and status.slots[slot].node not in ("", node)
        )
        self.train_for(3)
        lines = self.lines()
        found = measure.move(lines, kind=kind, slot=slot, at=at)
        steady = steady_step([line for line in lines if began <= line.t <= at], slot)
        figures.pauses.append(found.pause_s)
        figures.firsts.append(found.phases_s.first_step)
        figures.steadies.append(steady)
        figures.ratios.append(found.phases_s.first_step / steady)
        self.cluster.scheduler.resume(node)

    def order(self) -> None:
        """Have another standby started."""
        if self.cluster.scheduler.order(self.job, ()) is None:
            msg = "no node is free for another standby"
            raise TmoverError(msg)


def steady_step(lines: Iterable[Line], slot: int) -> float:
    """Return the median time from a step's beginning to its end, of one slot's rank."""
    begun: dict[int | None, float] = {}
    lengths: list[float] = []
    for line in lines:
        if line.slot == slot and line.event == "attempt":
            begun[line.step] = line.t
        elif line.slot == slot and line.event == "committed" and line.step in begun:
            lengths.append(line.t - begun[line.step])
    return statistics.median(lengths)


def _done(lines: Iterable[Line]) -> int:
    steps = (line.step for line in lines if line.event == "committed" and line.rank == 0)
    return max((step for step in steps if step is not None), default=-1)


# --- stages ---------------------------------------------------------------------------------------


def moves(name: str, *flags: str, count: int) -> Figures:
    """Move each slot in turn, `count` times in all."""
    figures = Figures()
    with _cluster() as cluster:
        bench = Bench(cluster, name, *flags, standby=1)
        for number in range(count):
            progress.show(number, count, name)
            bench.move(number % WORLD, figures)
            if number + 1 < count:
                bench.order()
        progress.show(count, count, name)
    return figures


def losses(name: str, *flags: str, count: int) -> Figures:
    """Lose a node with no standby, `count` times."""
    figures = Figures()
    with _cluster() as cluster:
        bench = Bench(cluster, name, *flags, standby=0)
        bench.until(lambda status: status.phase == "training")
        for number in range(count):
            progress.show(number, count, name)
            bench.lose(number % WORLD, figures)
        progress.show(count, count, name)
    return figures


def restarts(count: int) -> Figures:
    """Start a plain job again from its checkpoint, `count` times."""
    with tempfile.TemporaryDirectory(prefix="tmover-bench-") as folder:
        script = find_examples() / "train_gpt_plain.py"
        found = measure_restarts(
            script, pathlib.Path(folder), world=WORLD, kills=count, say=lambda _: None
        )
    return Figures(pauses=[one.pause_s for one in found])


class _cluster:
    """A cluster in a folder of its own."""

    def __enter__(self) -> LocalCluster:
        self._folder = tempfile.TemporaryDirectory(prefix="tmover-bench-")
        self._made = LocalCluster(pathlib.Path(self._folder.name) / "state", impatient(load()))
        return self._made.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._made.__exit__(*error)
        finally:
            self._folder.cleanup()


def attempt(name: str, stage: Callable[[], Figures]) -> Figures:
    """Return a stage's figures; none, and say why, if it could not be measured."""
    print(f"{name} ...", flush=True)
    try:
        return stage()
    except TmoverError as error:
        print(f"  not measured: {error}", flush=True)
        return Figures()


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--moves", type=int, default=10, help="of a warm standby; 3 of each other")
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    parser.add_argument("--only", default="", help="stages to measure, with commas between")
    args = parser.parse_args()
    for number in _ENDING:
        signal.signal(number, _end)  # whatever was started is ended then
    few = min(3, args.moves)
    stages: dict[str, Callable[[], Figures]] = {
        "restart": lambda: restarts(few),
        "live_handoff": lambda: losses("live hand-off", "--cold", count=few),
        "prepared_links": lambda: moves("prepared links", "--cold", count=few),
        "sandbox": lambda: moves("sandbox", count=args.moves),
        "cold_compiled": lambda: moves("cold, compiled", "--cold", "--compile", count=few),
        "warm_compiled": lambda: moves("warm, compiled", "--compile", count=args.moves),
    }
    wanted = args.only.split(",") if args.only else list(stages)
    print(f"load at the start: {os.getloadavg()[0]:.2f}; {os.cpu_count()} cores, {WORLD} ranks")
    found = {name: attempt(name, stages[name]) for name in wanted}
    figures = {name: found.get(name, Figures()) for name in stages}
    pauses = ("restart", "live_handoff", "prepared_links", "sandbox")
    ratios = {
        "warm_eager": "sandbox",
        "warm_compiled": "warm_compiled",
        "cold_eager": "prepared_links",
        "cold_compiled": "cold_compiled",
    }
    result = {
        "pause_s": {name: median(figures[name].pauses) for name in pauses},
        "first_step_ratio": {name: median(figures[of].ratios) for name, of in ratios.items()},
    }
    show(result, figures, ratios)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {args.json}")


def show(result: dict[str, Any], figures: dict[str, Figures], ratios: dict[str, str]) -> None:
    print("\npause (median)")
    for name, value in result["pause_s"].items():
        said = "not measured" if value is None else f"{value * 1000:9.1f} ms"
        print(f"  {name:16} {said}   of {len(figures[name].pauses)}")
    print("\na joiner's first step by the steady step (medians; the ratio's is of single moves)")
    for name, value in result["first_step_ratio"].items():
        of = figures[ratios[name]]
        if value is None:
            print(f"  {name:16} not measured")
            continue
        first, steady = median(of.firsts) or 0.0, median(of.steadies) or 0.0
        print(
            f"  {name:16} {value:6.2f}   {first * 1000:8.1f} ms by {steady * 1000:6.1f} ms, "
            f"of {len(of.ratios)}, from {min(of.ratios):.2f} to {max(of.ratios):.2f}"
        )


if __name__ == "__main__":
    main()
