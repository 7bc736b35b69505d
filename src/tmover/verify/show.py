"""A whole verification: undisturbed, with faults, and, if these part, undisturbed once more."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Sequence

import msgspec

from tmover.cluster import JobSpec, LocalCluster
from tmover.config import Config
from tmover.demo import measure
from tmover.demo.screen import Screen
from tmover.demo.show import impatient
from tmover.demo.trace import Line
from tmover.errors import ConfigError
from tmover.verify import faults as faulty
from tmover.verify.compare import parting, unseeded
from tmover.verify.report import Found, Report, causes
from tmover.verify.runs import Failed, Runs


def run(
    screen: Screen, config: Config, spec: JobSpec, *, given: Sequence[str], seed: int
) -> Report:
    """Run everything below one temporary directory, of which nothing is left."""
    with (
        tempfile.TemporaryDirectory(prefix="tmover-verify-") as folder,
        LocalCluster(pathlib.Path(folder) / "state", impatient(config)) as cluster,
    ):
        return Verification(Runs(cluster, screen, spec), screen, spec).report(given, seed)


class Verification:
    """What the runs of one job say."""

    def __init__(self, runs: Runs, screen: Screen, spec: JobSpec) -> None:
        self._runs = runs
        self._screen = screen
        self._spec = spec

    def report(self, given: Sequence[str], seed: int) -> Report:
        """Do the runs, and compare them."""
        world_size = self._spec.nodes * self._spec.nproc
        self._screen.say(f"undisturbed run: {self._spec.nodes} nodes, {world_size} ranks")
        calm = self._runs.run("undisturbed run")
        steps = _steps(calm)
        count = max(1, self._spec.standby)
        faults = tuple(given) or faulty.draw(seed, count, steps=steps, world_size=world_size)
        plan = Report(
            verified=False,
            equal=False,
            steps=steps,
            world_size=world_size,
            seed=None if given else seed,
            faults=faults,
        )
        for fault in faults:
            self._screen.say(f"run with --faults {fault}")
        try:
            harmed = self._runs.run("run with faults", faults)
        except Failed as error:
            return msgspec.structs.replace(plan, failure=str(error))
        return self._compared(plan, calm, harmed)

    def _compared(self, plan: Report, calm: list[Line], harmed: list[Line]) -> Report:
        """Return the report with what the two runs have come to."""
        found, samples = parting(calm, harmed), measure.samples(harmed, calm)
        missed = faulty.missed(plan.faults, harmed)
        equal = found is None and not samples.lost and not samples.repeated
        plan = msgspec.structs.replace(
            plan,
            equal=equal,
            verified=equal and not missed,
            missed=missed,
            lost=samples.lost,
            repeated=samples.repeated,
            unseeded=tuple(unseeded(calm, harmed)),
        )
        if found is None:
            return plan
        self._screen.say(f"they part at step {found.step}; once more without faults, to see why")
        chance = parting(calm, self._runs.run("second undisturbed run"))
        where = Found.of(chance or found, [] if chance else harmed)
        return msgspec.structs.replace(
            plan,
            parting=Found.of(found, harmed),
            deterministic=chance is None,
            causes=causes(where, deterministic=chance is None, unseeded=plan.unseeded),
        )


def _steps(calm: Sequence[Line]) -> int:
    """Return how many steps the loop has: those that have samples, if any has."""
    done = [line for line in calm if line.event == "committed"]
    if not done:
        msg = "the script did no step under tmover: does it loop over session.steps()?"
        raise ConfigError(msg)
    ended = [line.step for line in calm if line.event == "finished" and line.step is not None]
    return max(ended) + 1 if ended else max(line.step or 0 for line in done) + 1
