"""The demo's two runs of one job: with a planned move and the loss of rank 0, and undisturbed."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable
from typing import Literal

from tmover import wire
from tmover.cluster import JobSpec, LocalCluster, agent_argv
from tmover.controller.client import Client
from tmover.demo.screen import Screen
from tmover.demo.trace import Line, read
from tmover.errors import SchedulerError

NODES = 4
SLOT_TO_MOVE = 2
SETTLE = 20
"""Steps the job trains before something is done to it."""
_POLL_S = 0.1
_WAIT_S = 600.0
_LOG_LINES = 20


@dataclasses.dataclass(frozen=True)
class Interruption:
    """What was done to the job, and when (monotonic clock)."""

    kind: Literal["planned", "failure"]
    slot: int
    at: float


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has ended, as its workers saw it."""

    lines: list[Line]
    interruptions: list[Interruption]


class DemoJob:
    """One run of the script on the cluster; every wait shows how far it is."""

    def __init__(
        self,
        cluster: LocalCluster,
        screen: Screen,
        *,
        name: str,
        script: pathlib.Path,
        steps: int,
        standby: int,
    ) -> None:
        self._cluster = cluster
        self._screen = screen
        self._name = name
        self._steps = steps
        self._step = 0
        self._trace = cluster.state / "trace" / name.replace(" ", "-")
        scratch = cluster.state / "tmp"  # a torchrun that is killed leaves files
        scratch.mkdir(parents=True, exist_ok=True)
        env = {"TMOVER_TRACE": str(self._trace), "TMPDIR": str(scratch)}
        self._id = cluster.submit(
            JobSpec(
                nodes=NODES,
                standby=standby,
                nproc=1,
                argv=agent_argv(str(script), "--steps", str(steps)),
                env={**os.environ, **env},
                cwd=pathlib.Path.cwd(),
            )
        )

    def wait(self, what: str, until: Callable[[wire.JobStatus], bool]) -> wire.JobStatus:
        """Return the status once `until` holds. Raises `SchedulerError` with rank 0's log."""
        deadline = time.monotonic() + _WAIT_S
        with Client(self._cluster.state) as client:
            while True:
                answer = client.request(wire.StatusRequest(job=self._id))
                if not isinstance(answer, wire.StatusReply):
                    msg = f"the controller answered with {answer}"
                    raise SchedulerError(msg)
                status = answer.jobs[0]
                self._step = max(self._step, status.step or 0)  # a joiner has none at first
                self._screen.show(self._name, self._step, self._steps)
                if until(status):
                    return status
                if status.code is not None or time.monotonic() > deadline:
                    raise SchedulerError(self._did_not(what, status))
                time.sleep(_POLL_S)

    def move(self, slot: int) -> Interruption:
        """Move a slot to the standby, and wait until its node is free."""
        node = self.node_of(slot)
        at = time.monotonic()
        self._cluster.move(self._id, node, "the demo asks for it")
        self.wait(
            f"move {node}",
            lambda status: status.phase == "training" and status.slots[slot].node != node,
        )
        return Interruption("planned", slot, at)

    def warm_standby(self) -> str:
        """Wait until the standby is warm; return its node."""
        status = self.wait(
            "warm its standby", lambda status: "warm" in [one.state for one in status.standbys]
        )
        return next(one.node for one in status.standbys if one.state == "warm")

    def order_standby(self, *, exclude: str) -> None:
        """Have the scheduler start another standby, on any node but `exclude`."""
        if self._cluster.scheduler.order(self._id, (exclude,)) is None:
            msg = "no node is free for another standby; raise nodes in the table [local]"
            raise SchedulerError(msg)

    def kill(self, slot: int) -> Interruption:
        """Cut the power of a slot's node, and wait until another node has its ranks."""
        node = self.node_of(slot)
        at = self._cluster.fail_node(node)
        self.wait(
            f"replace {node}",
            lambda status: status.phase == "training" and status.slots[slot].node != node,
        )
        return Interruption("failure", slot, at)

    def node_of(self, slot: int) -> str:
        """Return the node that holds a slot."""
        return self.wait("place all ranks", lambda status: bool(status.slots)).slots[slot].node

    def train_until(self, step: int) -> None:
        """Wait until the job has come to `step`."""
        self.wait(f"come to step {step}", lambda _: self._step >= step)

    def train_for(self, steps: int) -> None:
        """Wait until the job is that much further."""
        self.train_until(self._step + steps)

    def finish(self) -> list[Line]:
        """Wait until the job has ended well; return what its workers wrote."""
        self.wait("end well", lambda status: status.code == 0)
        self._screen.hide()
        return read(self._trace)

    def _did_not(self, what: str, status: wire.JobStatus) -> str:
        """Return why the demo stops here, with the end of rank 0's log."""
        node = status.slots[0].node if status.slots else ""
        log = self._cluster.logs(self._id) / f"{node}.log"
        tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
        state = status.outcome or f"{status.phase}, step {status.step}"
        return "\n".join([f"{self._name} did not {what}: {state}", *status.notes, *tail])


def moved(cluster: LocalCluster, screen: Screen, script: pathlib.Path, steps: int) -> Run:
    """Train through a planned move and through the loss of the node with rank 0."""
    screen.say(f"{NODES} nodes and a standby start: agents, torchrun, workers")
    job = DemoJob(cluster, screen, name="moved run", script=script, steps=steps, standby=1)
    standby = job.warm_standby()
    job.train_until(SETTLE)
    leaver = job.node_of(SLOT_TO_MOVE)
    screen.say(f"training, the standby {standby} is warm: {leaver} is to be left")
    planned = job.move(SLOT_TO_MOVE)
    screen.say(f"rank {SLOT_TO_MOVE} trains on {job.node_of(SLOT_TO_MOVE)}")
    job.train_for(SETTLE)
    screen.say(f"a new standby starts, on another node than {leaver}")
    job.order_standby(exclude=leaver)
    standby = job.warm_standby()
    screen.say(f"the standby {standby} is warm: {job.node_of(0)}, which has rank 0, is killed")
    failure = job.kill(0)
    screen.say(f"rank 0 trains on {job.node_of(0)}")
    return Run(job.finish(), [planned, failure])


def undisturbed(cluster: LocalCluster, screen: Screen, script: pathlib.Path, steps: int) -> Run:
    """Train the same job with nothing done to it."""
    screen.say("the same job, undisturbed")
    job = DemoJob(cluster, screen, name="undisturbed run", script=script, steps=steps, standby=0)
    return Run(job.finish(), [])
