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
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple

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
WORLD = 2
"""A core for each rank: with fewer, the length of a step is the scheduler's."""
STANDBYS = 2
"""That are got ready at once."""
SETTLE, STEADY = 5, 20
"""Steps before each move: the first ones after a rest, and those that are looked at."""
PATIENCE_S = 300.0
Kind = Literal["planned", "failure"]
_QUIET_S = 1.0
"""After a move nobody looks for so long: whoever looks needs a core."""
_POLL_S = 0.25
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass
class Figures:
    """Of one kind of replacement: pauses, first steps and steady steps, in seconds.

    `ratios` and `cpu_ratios` are of a first step by the median steady one before it.
    """

    pauses: list[float] = dataclasses.field(default_factory=list)
    ratios: list[float] = dataclasses.field(default_factory=list)
    cpu_ratios: list[float] = dataclasses.field(default_factory=list)
    firsts: list[float] = dataclasses.field(default_factory=list)
    leads: list[float] = dataclasses.field(default_factory=list)
    """What of a first step is before its `with`."""
    steadies: list[float] = dataclasses.field(default_factory=list)


class Bench:
    """One job, whose nodes are replaced one after the other."""

    def __init__(self, cluster: LocalCluster, name: str, *flags: str, standby: int) -> None:
        self.cluster, self.name = cluster, name
        self._trace = cluster.state / "trace" / name.replace(" ", "-")
        scratch = cluster.state / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        self._rest, self._cpu = scratch / "rest", scratch / "cpu"
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE.parent / "src"),
            "TMOVER_TRACE": str(self._trace),
            "TMPDIR": str(scratch),  # caches of processes that are killed are removed with it
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else a pool of processes stays
        }
        argv = agent_argv(str(HERE / "ablated.py"), "--folder", str(scratch), *flags)
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

    def get_ready(self, slot: int, standbys: int) -> None:
        """Let the ranks rest until all standbys rest, one of which can take the slot as it is."""
        self._rest.touch()
        self.until(
            lambda status: (
                status.phase == "training"
                and len(status.standbys) >= standbys
                and all(s.state == "warm" for s in status.standbys)
                and any(slot in s.takes for s in status.standbys)
            )
        )
        self._rest.unlink()

    def move(self, slot: int, figures: Figures, *, standbys: int) -> None:
        """Move a slot to a standby that rests, and note what it took."""
        self.get_ready(slot, standbys)
        began, node = self._train(slot)
        at = time.monotonic()
        self.cluster.move(self.job, node, "it is measured")
        self._note(slot, node, at, began, "planned", figures)

    def lose(self, slot: int, figures: Figures) -> None:
        """Cut a slot's node off its power, and note what it took."""
        began, node = self._train(slot)
        at = self.cluster.fail_node(node)
        self._note(slot, node, at, began, "failure", figures)

    def _train(self, slot: int) -> tuple[float, str]:
        """Do the steady steps; return when they began, and the slot's node."""
        node = self.until(lambda status: status.phase == "training").slots[slot].node
        self.train_for(SETTLE)
        began = time.monotonic()
        self.train_for(STEADY)
        return began, node

    def _note(
        self, slot: int, node: str, at: float, began: float, kind: Kind, figures: Figures
    ) -> None:
        time.sleep(_QUIET_S)
        self.until(
            lambda status: status.phase == "training" and status.slots[slot].node not in ("", node)
        )
        self.train_for(3)
        lines = [line for line in self.lines() if line.t >= began]
        found = measure.move(lines, kind=kind, slot=slot, at=at)
        before, step = step_times(lines, slot, at)
        figures.pauses.append(found.pause_s)
        figures.firsts.append(step.length)
        figures.leads.append(step.lead)
        figures.steadies.append(statistics.median(one.length for one in before))
        figures.ratios.append(figures.firsts[-1] / figures.steadies[-1])
        cpu = self._cpu_times(slot)
        steady = statistics.median(cpu[one.step] for one in before)
        figures.cpu_ratios.append(cpu[step.step] / steady)
        self.cluster.scheduler.resume(node)

    def _cpu_times(self, rank: int) -> dict[int, float]:
        """Return how many seconds of a core each step of a rank took, without what is around it."""
        rows = (line.split() for line in self._cpu.read_text().splitlines())
        return {int(step): float(took) for of, step, took in rows if int(of) == rank}

    def order(self, count: int) -> None:
        """Have more standbys started."""
        for _ in range(count):
            if self.cluster.scheduler.order(self.job, ()) is None:
                msg = "no node is free for another standby"
                raise TmoverError(msg)


class Took(NamedTuple):
    """A step, and how long it took with what is around it, in seconds."""

    step: int
    length: float
    lead: float = 0.0
    """What of that is before its `with`, if that was looked at."""


def step_times(lines: Sequence[Line], slot: int, at: float) -> tuple[list[Took], Took]:
    """Return the steps of a slot's rank before `at`, and the first one of the joiner after it.

    A step lasts from the end of the one before it; a joiner's first from when it passed into its
    world. So fetching the batch, and all that a process does once it has its rank, is in it.
    """
    epoch = measure.next_epoch(lines, at)
    own = [line for line in lines if line.slot == slot]
    ends = [line for line in own if line.event == "committed" and line.t <= at]
    before = [Took(b.step or 0, b.t - a.t) for a, b in itertools.pairwise(ends)]
    if len(before) < STEADY // 2:
        msg = f"only {len(before)} steps were there to be measured"
        raise TmoverError(msg)
    passed = next(line for line in own if (line.event, line.epoch) == ("passed", epoch))
    begun = next(line for line in own if line.event == "attempt" and line.t >= passed.t)
    ended = next(line for line in own if line.event == "committed" and line.t >= passed.t)
    return before, Took(ended.step or 0, ended.t - passed.t, begun.t - passed.t)


def _done(lines: Iterable[Line]) -> int:
    steps = (line.step for line in lines if line.event == "committed" and line.rank == 0)
    return max((step for step in steps if step is not None), default=-1)


# --- stages ---------------------------------------------------------------------------------------


def moves(name: str, *flags: str, count: int) -> Figures:
    """Move each slot in turn, `count` times in all."""
    figures = Figures()
    with cluster_of_its_own() as cluster:
        left = min(STANDBYS, count)
        bench = Bench(cluster, name, *flags, standby=left)
        for number in range(count):
            progress.show(number, count, name)
            if not left:
                left = min(STANDBYS, count - number)
                bench.order(left)
            bench.move(number % WORLD, figures, standbys=left)
            left -= 1
        progress.show(count, count, name)
    return figures


def losses(name: str, *flags: str, count: int) -> Figures:
    """Lose a node with no standby, `count` times."""
    figures = Figures()
    with cluster_of_its_own() as cluster:
        bench = Bench(cluster, name, *flags, standby=0)
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


@contextlib.contextmanager
def cluster_of_its_own() -> Iterator[LocalCluster]:
    """Yield a cluster in a folder of its own, of which nothing is left afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="tmover-bench-") as folder,
        LocalCluster(pathlib.Path(folder) / "state", impatient(load())) as cluster,
    ):
        yield cluster


def attempt(name: str, stage: Callable[[], Figures]) -> Figures:
    """Return a stage's figures; none, and say why, if it could not be measured."""
    print(f"{name} ...", flush=True)
    try:
        return stage()
    except TmoverError as error:
        print(f"  not measured: {error}", flush=True)
        return Figures()


def _end(number: int, _frame: FrameType | None) -> None:
    for one in _ENDING:
        signal.signal(one, signal.SIG_IGN)
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
    # who compiles in the middle of a step keeps the others waiting, and is not stuck
    os.environ["TMOVER_CONTROLLER_STUCK_S"] = str(PATIENCE_S)
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
        first, lead, steady = (
            1000 * statistics.median(each) for each in (of.firsts, of.leads, of.steadies)
        )
        print(
            f"  {name:16} {value:6.2f}   {first:8.1f} ms, {lead:.1f} of them before it begins, "
            f"by {steady:6.1f} ms; of {len(of.ratios)}, from {min(of.ratios):.2f} to "
            f"{max(of.ratios):.2f}; by CPU time {statistics.median(of.cpu_ratios):.2f}"
        )


if __name__ == "__main__":
    main()
