"""One run of the script on the local scheduler, from its start to its end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from rich.markup import escape

from tmover.cluster import JobSpec, LocalCluster
from tmover.demo.screen import Screen
from tmover.demo.trace import Line, read
from tmover.errors import ControllerUnavailable, SchedulerError
from tmover.wire import JobStatus

_POLL_S = 0.1
_LOG_LINES = 12


class Failed(SchedulerError):
    """A run ended badly. The end of its output was shown."""

    exit_code = 1


class Runs:
    """Runs the same job again and again, each time with a trace of its own."""

    def __init__(self, cluster: LocalCluster, screen: Screen, spec: JobSpec) -> None:
        self._cluster = cluster
        self._screen = screen
        self._spec = spec
        self._steps = 0
        """How many a run has, as far as is known."""

    def run(self, name: str, faults: Sequence[str] = ()) -> list[Line]:
        """Return the trace of a run that ended well. Raises `Failed` if it did not."""
        trace = self._cluster.state / "trace" / name.replace(" ", "-")
        scratch = self._cluster.state / "tmp"  # a torchrun that is killed leaves files
        scratch.mkdir(parents=True, exist_ok=True)
        env = {
            **self._spec.env,
            "TMOVER_TRACE": str(trace),
            "TMOVER_TRACE_STATE": "1",
            "TMOVER_INJECT": ";".join(faults),
            "TMOVER_CHECKPOINTS": "0",  # one run would find another one's, and the user both's
            "TMOVER_RESUME": "",
            "TMPDIR": str(scratch),
        }
        standby = self._spec.standby if faults else 0
        job = self._cluster.submit(dataclasses.replace(self._spec, env=env, standby=standby))
        status = self._follow(job, name)
        self._screen.hide()
        self._cluster.end(job, "it is over")
        if status.code != 0:
            raise self._failed(job, name, status.outcome, status.notes)
        return read(trace)

    def _follow(self, job: str, name: str) -> JobStatus:
        """Show how far the job is until it has ended."""
        step, silent_at = 0, time.monotonic()
        patience_s = 2 * self._cluster.config.controller.lease_s
        while True:
            status = self._look(job)
            if status is not None:
                step = max(step, status.step or 0)  # a joiner has none at first
                self._steps = max(self._steps, step)
                self._screen.show(name, step, self._steps)
                if status.code is not None:
                    return status
            if self._cluster.scheduler.running(job):
                silent_at = time.monotonic()
            elif time.monotonic() - silent_at > patience_s:
                raise self._failed(job, name, "nothing of it runs any more")
            time.sleep(_POLL_S)

    def _look(self, job: str) -> JobStatus | None:
        try:
            return self._cluster.status(job)
        except ControllerUnavailable:
            self._cluster.ensure_controller()
            return None

    def _failed(self, job: str, name: str, why: str, notes: Sequence[str] = ()) -> Failed:
        """Show what happened and the end of the output; return the error to raise."""
        self._screen.hide()
        for line in (*notes, f"the {name} failed; its output ends with", *self._tail(job)):
            self._screen.say(f"  {escape(line)}")
        return Failed(f"the {name} failed: {why}")

    def _tail(self, job: str) -> list[str]:
        """Return the end of the output of the node that said most of what went wrong."""
        logs = self._cluster.logs(job)
        texts = [path.read_text(errors="replace") for path in sorted(logs.glob("node*.log"))]
        telling = next((text for text in texts if "Traceback" in text), next(iter(texts), ""))
        return telling.splitlines()[-_LOG_LINES:]
