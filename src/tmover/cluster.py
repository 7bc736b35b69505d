"""A whole cluster on this machine: a controller, nodes, and jobs on them.

`tmover submit --local` and `tmover demo` are made of this, and so are the tests: it can also cut a
node's power, kill an agent or a worker, kill the controller and start another. Several of these may
work on one state directory at once; they share its controller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import msgspec

from tmover import wire
from tmover.config import Config
from tmover.controller.client import ask
from tmover.controller.keys import private_directory
from tmover.controller.starter import StartController, Starter, start_controller, uninterrupted
from tmover.errors import ControllerUnavailable, SchedulerError, TmoverError
from tmover.owner import user_name
from tmover.process import (
    ProcessId,
    is_alive,
    python_argv,
    send_signal,
    wait_gone,
)
from tmover.scheduler.inhabitants import find_agent, find_worker
from tmover.scheduler.local import LocalScheduler, Spawn, spawn_holder
from tmover.scheduler.store import Command

_POLL_S = 0.05
_END_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What is to run, and on how many nodes."""

    nodes: int
    standby: int
    nproc: int
    argv: tuple[str, ...]
    """What each node runs: `tmover run ...`."""
    env: Mapping[str, str]
    cwd: pathlib.Path
    pool: str = ""
    """Jobs that name the same pool lend each other standbys."""
    refill: bool = False
    """Whether the controller starts the standbys, and others for those that are used up."""


def agent_argv(
    script: str, *arguments: str, nproc: int = 1, module: bool = False, flags: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the `tmover run` command that runs `script` on a node."""
    mode = ("-m",) if module else ()
    run = (*python_argv("tmover"), "run", "--nproc-per-node", str(nproc))
    return (*run, *flags, *mode, script, *arguments)


class LocalCluster:
    """Use it as a context manager: at the end, nothing that it started is left."""

    def __init__(
        self,
        state: pathlib.Path,
        config: Config,
        *,
        start: StartController = start_controller,
        spawn: Spawn = spawn_holder,
    ) -> None:
        self.state = private_directory(state)
        self.config = config
        self.scheduler = LocalScheduler(state / "cluster", capacity=config.local.nodes, spawn=spawn)
        self._starter = Starter(self.state, start)
        self._jobs: list[str] = []
        self._is_detached = False

    def is_gone(self) -> bool:
        """Return whether the state directory was removed: its jobs can be reached no more."""
        return self.scheduler.is_gone()

    # --- the controller ---------------------------------------------------------------------------

    def ensure_controller(self) -> None:
        """Start a controller if none runs on the state directory."""
        with self._starter.locked(), uninterrupted():
            self._ensure_controller()

    def controller(self) -> ProcessId | None:
        """Return the controller's process, or None if none runs."""
        return self._starter.running()

    def kill_controller(self) -> None:
        """Kill the controller as a crash would."""
        controller = self.controller()
        if controller is not None:
            send_signal(controller, signal.SIGKILL)
            wait_gone([controller], timeout_s=_END_S)
        self._starter.collect()

    # --- jobs -------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec) -> str:
        """Start a job and its standbys; return its id.

        Raises `SchedulerError`, and leaves no job behind, if there are not enough free nodes.
        """
        self.scheduler.check_room(spec.nodes + spec.standby)
        with self._starter.locked(), uninterrupted():
            self._ensure_controller()
            request = wire.SubmitRequest(
                nnodes=spec.nodes,
                nproc=spec.nproc,
                owner=user_name(),
                standby=spec.standby if spec.refill else 0,
                pool=spec.pool,
            )
            job = self.ask(request).job
            self._jobs.append(job)
        try:
            started = 0 if spec.refill else spec.standby
            names = self.scheduler.claim(job, spec.nodes + started)
            command = Command(
                argv=spec.argv, env=dict(spec.env), cwd=str(spec.cwd), logs=str(self.logs(job))
            )
            self.scheduler.register(job, command)
            for place, name in enumerate(names):
                is_member = place < spec.nodes
                slot = place if is_member else None
                self.scheduler.launch(job, name, standby=not is_member, slot=slot)
        except BaseException:
            self.end(job, "it could not be started")
            raise
        return job

    def logs(self, job: str) -> pathlib.Path:
        """Return the directory of the job's logs, one file per node."""
        return self.state / "logs" / job

    def ask(self, request: wire.AnyRequest) -> wire.Accepted:
        """Ask the controller for something. Raises `Refused` or `ControllerUnavailable`."""
        answer = ask(self.state, request, self.config.controller.request_s)
        assert isinstance(answer, wire.Accepted)  # noqa: S101 - the client has checked it
        return answer

    def status(self, job: str) -> wire.JobStatus:
        """Return how the job is."""
        request = wire.StatusRequest(job=job)
        answer = ask(self.state, request, self.config.controller.request_s)
        assert isinstance(answer, wire.StatusReply)  # noqa: S101 - the client has checked it
        return answer.jobs[0]

    def move(self, job: str, node: str, reason: str = "asked for") -> str:
        """Move the ranks of `node` to a standby; return what the controller says."""
        return self.ask(wire.MoveRequest(job=job, node=node, reason=reason)).text

    def wait(
        self, job: str, until: Callable[[wire.JobStatus], bool], *, timeout_s: float
    ) -> wire.JobStatus:
        """Return the job's status once `until` holds. Raises `SchedulerError` with what it saw."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen: object
            try:
                seen = status = self.status(job)
                if until(status):
                    return status
                if status.code is not None:
                    msg = f"job {job} ended while something else was waited for: {status}"
                    raise SchedulerError(msg)
            except ControllerUnavailable as error:
                seen = error
            if time.monotonic() > deadline:
                msg = f"job {job} did not come to what was waited for in {timeout_s:g} s: {seen}"
                raise SchedulerError(msg)
            time.sleep(_POLL_S)

    def end(self, job: str, reason: str) -> None:
        """End the job if it has not ended, kill what does not end in time, and free its nodes."""
        try:
            with contextlib.suppress(TmoverError):
                if self.status(job).code is None:
                    self.ask(wire.CancelRequest(job=job, reason=reason))
            deadline = time.monotonic() + (0 if self.is_gone() else self.config.agent.stop_s)
            while self.scheduler.running(job) and time.monotonic() < deadline:
                time.sleep(_POLL_S / 2)
        finally:
            self.scheduler.release(job)

    # --- damage -----------------------------------------------------------------------------------

    def fail_node(self, node: str) -> float:
        """Cut a node's power; return when (monotonic clock)."""
        return self.scheduler.fail(node)

    def kill_agent(self, node: str) -> float:
        """Kill a node's agent; return when."""
        return _kill(find_agent(self._holder(node)))

    def kill_worker(self, node: str, local_rank: int = 0) -> float:
        """Kill the process of one rank; return when."""
        return _kill(find_worker(self._holder(node), local_rank))

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End this object's jobs, and the controller if one of these started it and it is idle."""
        try:
            while self._jobs:
                self.end(self._jobs.pop(), "the cluster is closed")
        finally:
            self.stop_controller()

    def detach(self) -> None:
        """Have `close` leave everything as it is."""
        self._jobs.clear()
        self._is_detached = True

    def stop_controller(self) -> None:
        """End the controller if a `LocalCluster` started it and no job needs it."""
        if self._is_detached or self.is_gone():  # a controller without its directory ends itself
            return
        with self._starter.locked():
            owned = self._owned()
            if owned is None or not is_alive(owned):
                return
            if not self._is_idle():
                return
            send_signal(owned, signal.SIGTERM)
            if wait_gone([owned], timeout_s=_END_S):
                send_signal(owned, signal.SIGKILL)
                wait_gone([owned], timeout_s=_END_S)
        self._starter.collect()

    def __enter__(self) -> LocalCluster:
        """Return the cluster."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End everything."""
        self.close()

    # --- inside -----------------------------------------------------------------------------------

    def _ensure_controller(self) -> None:
        started = self._starter.ensure()
        if started is not None:
            self._owned_file.write_bytes(msgspec.json.encode(started))

    def _is_idle(self) -> bool:
        """Return whether the controller says that no job needs it. One that is silent does not."""
        try:
            request = wire.StatusRequest(job=None, ended=0)
            answer = ask(self.state, request, self.config.controller.request_s)
        except TmoverError:
            return False
        return isinstance(answer, wire.StatusReply) and not answer.jobs

    @property
    def _owned_file(self) -> pathlib.Path:
        """Names the controller that was started by a `LocalCluster`, not by a person."""
        return self.state / "cluster" / "controller.json"

    def _owned(self) -> ProcessId | None:
        try:
            return msgspec.json.decode(self._owned_file.read_bytes(), type=ProcessId)
        except (OSError, msgspec.DecodeError):
            return None

    def _holder(self, node: str) -> ProcessId:
        holder = self.scheduler.holder(node)
        if holder is None:
            msg = f"nothing runs on {node}"
            raise SchedulerError(msg)
        return holder


def _kill(process: ProcessId) -> float:
    send_signal(process, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_gone([process], timeout_s=_END_S)
    return killed_at
