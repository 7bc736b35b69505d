"""The whole demo: the runs, what they came to, and what a restart takes on the same machine."""

from __future__ import annotations

import pathlib
import tempfile

import msgspec

from tmover.cluster import LocalCluster
from tmover.config import Config
from tmover.demo import baseline, measure, runs
from tmover.demo.report import Report
from tmover.demo.screen import Screen
from tmover.demo.table import seconds
from tmover.errors import ConfigError

KILLS = 3
"""Restarts of the plain job; the median counts."""
_STOP_S = 1.0
"""How long a job that was interrupted may take to end before it is killed."""


def run(screen: Screen, config: Config, *, steps: int) -> Report:
    """Run everything below one temporary directory, of which nothing is left."""
    examples = find_examples()
    with tempfile.TemporaryDirectory(prefix="tmover-demo-") as name:
        folder = pathlib.Path(name)
        script = examples / "train_gpt.py"
        with LocalCluster(folder / "state", impatient(config)) as cluster:
            moved = runs.moved(cluster, screen, script, steps)
            twin = runs.undisturbed(cluster, screen, script, steps)
        restarts = baseline.measure_restarts(
            examples / "train_gpt_plain.py",
            folder / "plain",
            world=runs.NODES,
            kills=KILLS,
            say=screen.say,
        )
        screen.say("restarts took " + ", ".join(seconds(one.pause_s) for one in restarts))
    return Report(
        equal=measure.equal(moved.lines, twin.lines, world_size=runs.NODES),
        world_size=runs.NODES,
        steps=steps,
        step_s=measure.steady_step(moved.lines),
        moves=[
            measure.move(moved.lines, kind=one.kind, slot=one.slot, at=one.at)
            for one in moved.interruptions
        ],
        restart=measure.median(restarts),
        samples=measure.samples(moved.lines, twin.lines),
    )


def impatient(config: Config) -> Config:
    """Return `config` with nothing waited for after Ctrl-C: there is no work to be saved."""
    agent = msgspec.structs.replace(config.agent, stop_s=_STOP_S)
    return msgspec.structs.replace(config, agent=agent)


def find_examples() -> pathlib.Path:
    """Return the directory of the example scripts: this checkout's, or the current directory's."""
    here = pathlib.Path(__file__).resolve()
    for root in (*here.parents[3:4], pathlib.Path.cwd()):
        if (root / "examples" / "train_gpt_plain.py").exists():
            return root / "examples"
    msg = "the demo's scripts are not here: run it in a checkout of tmover, which has examples/"
    raise ConfigError(msg)
