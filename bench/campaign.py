"""Do random harm to jobs and compare each with its undisturbed twin: `make campaign`.

    python bench/campaign.py --faults 100 --seed 7

Every run has a seed of its own, the first `--seed`, the next one more; all that happens in it is
drawn from that, so `--seed N --faults 1` repeats run N. What a run that is not equal has left (its
scenario, the controller's answer, traces, the nodes' output) is kept beside the file of figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from scenarios import KINDS, Scenario, draw
from support.forkserver import ForkServer
from support.training import Kind, Training
from tmover.cluster import LocalCluster
from tmover.config import load
from tmover.demo import measure
from tmover.demo.report import Samples
from tmover.demo.trace import Line, read
from tmover.errors import SchedulerError, TmoverError
from tmover.verify.compare import parting, unseeded
from tmover.wire import JobStatus

OUT = pathlib.Path(__file__).parent / "out" / "campaign.json"
PATIENCE_S = 120.0
_POLL_S = 0.02
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BUSY = {"armed", "switching", "revoked", "waiting"}
"""Phases in which a move that was asked for is under way, or has been overtaken by a loss."""


@dataclasses.dataclass
class Figures:
    """What the campaign has come to so far."""

    seed: int
    runs: int = 0
    faults: int = 0
    equal: int = 0
    lost: int = 0
    repeated: int = 0
    failed_seeds: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Ended:
    """What is left of a run."""

    lines: list[Line]
    faults: int
    trouble: str
    """Why it did not end well, "" if it did."""
    remains: str = ""
    """What a person needs to find out why, if something is wrong."""


class Campaign:
    """Runs scenarios, and an undisturbed twin of each kind once."""

    def __init__(self, server: ForkServer, folder: pathlib.Path) -> None:
        self._server = server
        self._folder = folder
        self._twins: dict[str, list[Line]] = {}

    def twin(self, kind: str) -> list[Line]:
        """Return the trace of an undisturbed run. Raises `SchedulerError` if it ends badly."""
        if kind not in self._twins:
            calm = Scenario(0, kind, 0, None, None, "", ())
            ended = self.run(calm)
            if ended.trouble:
                msg = f"the undisturbed run of {kind}: {ended.trouble}\n{ended.remains}"
                raise SchedulerError(msg)
            self._twins[kind] = ended.lines
        return self._twins[kind]

    def run(self, scenario: Scenario) -> Ended:
        """Train once, do what the scenario says, wait for the end."""
        with (
            tempfile.TemporaryDirectory(dir=self._folder) as name,
            LocalCluster(
                pathlib.Path(name) / "state",
                load(),
                start=self._server.start_controller,
                spawn=self._server.spawn,
            ) as cluster,
        ):
            return Performance(cluster, scenario).watch()

    def verdict(self, scenario: Scenario, ended: Ended) -> tuple[str, Samples]:
        """Return what is wrong with a run, "" if nothing is, and what became of its samples."""
        expected = self.twin(scenario.kind)
        samples = measure.samples(ended.lines, expected)
        if ended.trouble:
            return ended.trouble, samples
        try:
            found = parting(expected, ended.lines)
        except TmoverError as error:
            return str(error), samples
        if loose := unseeded(expected, ended.lines):
            return f"random streams that begin otherwise: {loose}", samples
        if found is not None:
            return f"parts at step {found.step}: {found.names}", samples
        if samples.lost or samples.repeated:
            return f"{samples.lost} samples lost, {samples.repeated} repeated", samples
        return "", samples


class Performance:
    """One run of one scenario."""

    def __init__(self, cluster: LocalCluster, scenario: Scenario) -> None:
        self._cluster = cluster
        self._scenario = scenario
        self._kind: Kind = KINDS[scenario.kind]
        self._gate = cluster.state / "gate"
        self._trace = cluster.state / "trace"
        self._controllers = 0
        """How often the controller was killed."""
        inject = list(scenario.inject)
        if scenario.hold is not None:
            gate = f"point=after_body,until={self._gate}"
            inject.insert(0, f"hold:rank=0,step={scenario.hold},{gate}")
        self._training = Training(
            cluster,
            self._kind,
            standby=scenario.standbys,
            inject=";".join(inject),
            settings={"TMOVER_TRACE_STATE": "1"},
        )

    def watch(self) -> Ended:
        """Do what is to be done from outside, and return what is left at the end."""
        trouble = ""
        status: object = None
        try:
            self._act()
            status = self._until(lambda status: status.code is not None)
            if status.code != 0:
                trouble = f"exit code {status.code}: {status.outcome}"
        except TmoverError as error:
            trouble = f"{type(error).__name__}: {error}"
        lines = read(self._trace)
        done = [line for line in lines if line.event == "fault" and line.fault != "hold"]
        return Ended(lines, len(done) + self._controllers, trouble, self._remains(status))

    def _act(self) -> None:
        scenario, job = self._scenario, self._training.job
        if scenario.hold is None:
            return
        self._wait(lambda: self._has_committed(scenario.hold))
        self._until(
            lambda status: (
                status.phase in _BUSY
                or sum(one.state == "warm" for one in status.standbys) == scenario.standbys
            )
        )
        if scenario.move is not None:
            self._cluster.move(job, self._training.node_of(scenario.move))
            if scenario.controller != "preparing":
                self._until(_is_under_way)
        if scenario.controller:
            self._cluster.kill_controller()
            self._controllers += 1
        self._gate.touch()
        if scenario.controller:
            self._wait(self._needs_controller)
            self._cluster.ensure_controller()

    def _needs_controller(self) -> bool:
        """Return whether a job without a controller has come to where it needs one, or ended."""
        hold = self._scenario.hold
        assert hold is not None
        events = {line.event for line in read(self._trace)}
        return bool(events & {"revoked", "finished"}) or self._has_committed(hold + 4)

    def _has_committed(self, step: int | None) -> bool:
        lines = read(self._trace)
        return any((one.event, one.rank, one.step) == ("committed", 0, step) for one in lines)

    def _until(self, due: Callable[[JobStatus], bool]) -> JobStatus:
        return self._cluster.wait(self._training.job, due, timeout_s=PATIENCE_S)

    def _wait(self, due: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not due():
            if time.monotonic() > deadline:
                msg = f"the job did not come to where the scenario begins in {PATIENCE_S:g} s"
                raise SchedulerError(msg)
            time.sleep(_POLL_S)

    def _remains(self, status: object) -> str:
        told = [
            f"{line.t:.3f} {line.worker} rank {line.rank} {line.event} step {line.step} "
            f"epoch {line.epoch} {line.fault} {line.point}"
            for line in read(self._trace)
            if line.event != "state"
        ]
        journal = [
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in self._cluster.state.rglob("*journal*")
            if path.is_file()
        ]
        return "\n".join([str(status), *told, self._training.log(), *journal])


def _is_under_way(status: JobStatus) -> bool:
    called_off = any("called off" in note for note in status.notes)
    return status.phase in _BUSY or (status.phase == "training" and called_off)


def main() -> None:
    """Run until so many faults were done, write the file, exit with 1 if a run was not equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="to do, in all")
    parser.add_argument("--seed", type=int, help="of the first run; drawn if it is not given")
    parser.add_argument("--json", type=pathlib.Path, default=OUT, help="where the figures go")
    parser.add_argument("--kinds", help=f"which jobs, by commas: {', '.join(KINDS)}")
    args = parser.parse_args()
    kinds = tuple(args.kinds.split(",")) if args.kinds else tuple(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if args.faults < 1:
        parser.error("--faults: at least one")
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    for number in _ENDING:
        signal.signal(number, _end)
    server = ForkServer()
    try:
        with tempfile.TemporaryDirectory(prefix="tmover-campaign-") as folder:
            figures = _go_on(Campaign(server, pathlib.Path(folder)), seed, kinds, args)
    finally:
        server.close()
    print(f"\n{figures.equal} of {figures.runs} runs equal; written to {args.json}")
    sys.exit(0 if figures.equal == figures.runs else 1)


def _go_on(
    campaign: Campaign, seed: int, kinds: tuple[str, ...], args: argparse.Namespace
) -> Figures:
    """Run one scenario after the other; the file is written after each."""
    figures = Figures(seed)
    while figures.faults < args.faults:
        scenario = draw(seed + figures.runs, kinds)
        campaign.twin(scenario.kind)
        began = time.monotonic()
        ended = campaign.run(scenario)
        wrong, samples = campaign.verdict(scenario, ended)
        figures.runs += 1
        figures.faults += ended.faults
        figures.lost += samples.lost
        figures.repeated += samples.repeated
        if wrong:
            figures.failed_seeds.append(scenario.seed)
            _keep(
                args.json.parent / f"{args.json.stem}-{scenario.seed}.log", scenario, wrong, ended
            )
        else:
            figures.equal += 1
        _write(args.json, dataclasses.asdict(figures))
        took = time.monotonic() - began
        print(
            f"{figures.faults:4d} of {args.faults}  seed {scenario.seed}  {took:5.1f} s  "
            f"{'equal' if not wrong else 'NOT EQUAL'}  {scenario}"
            + (f"\n      {wrong.splitlines()[0]}" if wrong else ""),
            flush=True,
        )
    return figures


def _keep(file: pathlib.Path, scenario: Scenario, wrong: str, ended: Ended) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{scenario!r}\n{wrong}\n\n{ended.remains}\n")


def _write(file: pathlib.Path, figures: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures, indent=1) + "\n")


def _end(number: int, frame: FrameType | None) -> None:
    """End everything on the way out; a second Ctrl-C does not stop that."""
    del frame
    for one in _ENDING:
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
