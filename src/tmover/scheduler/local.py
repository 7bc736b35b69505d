"""A scheduler for one machine: nodes are process trees with addresses 127.0.0.2, .3, ...

It behaves as Slurm does where tmover can tell the difference: states and names, nodes that are
drained, fail, come back, and are ordered anew. Its memory is a directory, so that the controller,
`tmover submit` and tests use the same nodes at once, and none of them has to live.

A node is down when its holder has ended without a word, which is what a power cut looks like. It
comes back when it is resumed, or when nothing of the job that it failed under runs any more.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from tmover.environment import AgentEnvironment
from tmover.errors import SchedulerError
from tmover.process import ProcessId, identify, is_alive, python_argv, reap, spawn_apart
from tmover.scheduler.fence import kill_everything
from tmover.scheduler.holder import write_status
from tmover.scheduler.hostlist import natural
from tmover.scheduler.interface import NodeInfo, NodeState
from tmover.scheduler.store import Command, NodeRecord, StepFile, StepStatus, Store

Spawn = Callable[[pathlib.Path, pathlib.Path], int]
"""Starts a holder in a session of its own, for a step file, output to a log; returns its pid."""


def spawn_holder(step: pathlib.Path, log: pathlib.Path) -> int:
    """Start a holder as a process of its own."""
    argv = [*python_argv("tmover.scheduler.holder"), str(step)]
    return spawn_apart(argv, os.environ, log)


class LocalScheduler:
    """Hands out the nodes below `root`. Any number of these may use one directory."""

    def __init__(
        self, root: pathlib.Path, *, capacity: int = 64, spawn: Spawn = spawn_holder
    ) -> None:
        self._store = Store(root)
        self._capacity = capacity
        self._spawn = spawn
        self._children: set[int] = set()
        self._launched: list[tuple[str, ProcessId]] = []
        """The job and the holder of what this object has started."""

    # --- what every scheduler can do --------------------------------------------------------------

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes made so far."""
        self.collect()
        records = sorted(self._store.nodes().values(), key=lambda record: natural(record.name))
        return [self._info(record) for record in records]

    def start(
        self,
        node: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        job: str,
        log: pathlib.Path,
    ) -> str:
        """Run `argv` on `node` in the current directory; return the job step's id."""
        step = StepFile(argv=tuple(argv), env=dict(env), cwd=str(pathlib.Path.cwd()))
        with self._store.locked():
            return self._start(self._record(node), job, step, log)

    def drain(self, node: str, reason: str) -> None:
        """Take no new work to `node`; what runs there goes on."""
        with self._store.locked():
            self._change(self._record(node), drain=reason or "drained")

    def resume(self, node: str) -> None:
        """Undo `drain`, and take a failed node back into service."""
        with self._store.locked():
            record = self._change(self._record(node), drain="")
            if self._info(record).state is NodeState.DOWN:
                self._free(record)

    def end(self, node: str, reason: str) -> None:
        """Kill everything on `node` at once; if it was not down, it is free afterwards."""
        record = self._record(node)
        was_running = _runs(record)
        self._kill(record)
        with self._store.locked():
            if was_running and self._store.status(record.step) is None:
                write_status(self._store.step_file(record.step), -signal.SIGKILL, reason)

    def order(self, job: str, exclude: Collection[str]) -> str | None:
        """Start another standby of `job`; None if every node is taken, excluded or down."""
        if self._store.command(job) is None:
            return None
        free = self._claim(job, 1, exclude)
        if not free:
            return None
        self.launch(job, free[0], standby=True)
        return free[0]

    def reassign(self, node: str, job: str, to: str) -> None:
        """Let a node of `job`, and what runs there, belong to the job `to`."""
        with self._store.locked():
            record = self._store.nodes().get(node)
            if record is not None and record.job == job:
                self._change(record, job=to)

    # --- what `tmover submit --local` and tests do besides ----------------------------------------

    def claim(self, job: str, count: int) -> list[str]:
        """Take `count` free nodes for `job`, making new ones as needed. Raises if there are fewer.

        A claimed node on which nothing is started is free again when the claiming process ends.
        """
        self.check_room(count)
        names = self._claim(job, count, ())
        if len(names) < count:  # somebody else was quicker
            self.release(job)
            raise SchedulerError(self._no_room(len(names), count))
        return names

    def check_room(self, count: int) -> None:
        """Raise `SchedulerError` if there are fewer than `count` free nodes now."""
        with self._store.locked():
            self._tidy()
            free = len(list(self._idle(())))
        if free < count:
            raise SchedulerError(self._no_room(free, count))

    def register(self, job: str, command: Command) -> None:
        """Say what each node of `job` runs."""
        pathlib.Path(command.logs).mkdir(parents=True, exist_ok=True)
        self._store.save_command(job, command)

    def launch(self, job: str, node: str, *, standby: bool, slot: int | None = None) -> str:
        """Start the job's command on a claimed node; return the job step's id."""
        command = self._store.command(job)
        if command is None:
            msg = f"the local scheduler knows no job {job}"
            raise SchedulerError(msg)
        with self._store.locked():
            record = self._record(node)
            place = AgentEnvironment(
                state=self._store.root.parent,
                job=job,
                node=node,
                address=record.address,
                standby=standby,
                slot=slot,
            )
            env = {**command.env, **place.export()}
            step = StepFile(argv=command.argv, env=env, cwd=command.cwd)
            return self._start(record, job, step, pathlib.Path(command.logs) / f"{node}.log")

    def fail(self, node: str) -> float:
        """Cut the node's power: everything on it is killed at once, and the node is down.

        Returns when (monotonic clock).
        """
        return self._kill(self._record(node))

    def status(self, step: str) -> StepStatus | None:
        """Return how `step` ended, or None while it runs and if its node failed."""
        return self._store.status(step)

    def running(self, job: str) -> list[str]:
        """Return the nodes on which something of `job` runs."""
        self.collect()
        records = self._store.nodes().values()
        return [r.name for r in records if r.job == job and _runs(r)]

    def holder(self, node: str) -> ProcessId | None:
        """Return the process at the root of what runs on `node`."""
        record = self._record(node)
        return record.holder if _runs(record) else None

    def release(self, job: str) -> None:
        """End whatever of `job` still runs; its nodes are free, those that failed included.

        If the directory is gone, with what was known of nodes, what this object started is ended.
        """
        if self.is_gone():
            self.end_launched(job)
            return
        for node in self.running(job):
            self.end(node, "the job was released")
        with self._store.locked():
            for record in self._store.nodes().values():
                if record.job == job:
                    self._free(record)
            self._store.forget_command(job)

    def is_gone(self) -> bool:
        """Return whether the directory was removed: then nobody can tell any more what runs."""
        return self._store.is_gone()

    def end_launched(self, job: str | None = None) -> None:
        """Kill what this object started, of one job or of all; it needs no file for that."""
        for name, holder in self._launched:
            if job in (None, name):
                kill_everything(holder, mark="")
        self.collect()

    def collect(self) -> None:
        """Reap the holders this process started that have ended."""
        for pid in list(self._children):
            if reap(pid):
                self._children.discard(pid)

    # --- inside -----------------------------------------------------------------------------------

    def _claim(self, job: str, count: int, exclude: Collection[str]) -> list[str]:
        """Take up to `count` free nodes."""
        names: list[str] = []
        with self._store.locked():
            for record in itertools.islice(self._idle(exclude), count):
                self._change(record, job=job, claimant=identify(os.getpid()), step="")
                names.append(record.name)
        return names

    def _idle(self, exclude: Collection[str]) -> Iterator[NodeRecord]:
        """Yield the free nodes, those that have yet to be made included."""
        records = self._store.nodes()
        for number in range(1, self._capacity + 1):
            name = f"node{number}"
            record = records.get(name) or NodeRecord(name=name, address=f"127.0.0.{number + 1}")
            if name not in exclude and self._info(record).state is NodeState.IDLE:
                yield record

    def _no_room(self, free: int, count: int) -> str:
        return (
            f"the local scheduler has {free} free nodes, {count} are needed; end a job, "
            f"or raise nodes in the table [local] (now {self._capacity})"
        )

    def _start(self, record: NodeRecord, job: str, step: StepFile, log: pathlib.Path) -> str:
        info = self._info(record)
        claimed = info.state is NodeState.ALLOCATED and not _runs(record) and record.job == job
        if info.state is not NodeState.IDLE and not claimed:
            why = info.reason or f"by job {info.job}"
            msg = f"cannot start on {record.name}: it is {info.state.value}, {why}"
            raise SchedulerError(msg)
        name = self._store.new_step(record.name, step, last=record.step)
        pid = self._spawn(self._store.step_file(name), log)
        self._children.add(pid)
        holder = identify(pid) or ProcessId(pid, 0)
        self._launched.append((job, holder))
        self._change(record, job=job, step=name, holder=holder)
        return name

    def _kill(self, record: NodeRecord) -> float:
        killed_at = time.monotonic()
        if record.step:
            killed_at = kill_everything(record.holder, self._store.mark(record.step))
        self.collect()
        return killed_at

    def _tidy(self) -> None:
        """Free what belongs to jobs of which nothing runs and nothing is claimed any more."""
        records = self._store.nodes().values()
        alive = {record.job for record in records if _runs(record) or _is_claimed(record)}
        for record in records:
            if record.job not in alive and self._info(record).state is NodeState.DOWN:
                self._free(record)
        for job in self._store.commands():
            if job not in alive:
                self._store.forget_command(job)

    def _free(self, record: NodeRecord) -> None:
        self._change(record, job="", claimant=None, step="", holder=None)

    def _info(self, record: NodeRecord) -> NodeInfo:
        state, reason = self._state(record)
        allocated = state in (NodeState.ALLOCATED, NodeState.DRAINING)
        return NodeInfo(
            name=record.name,
            address=record.address,
            state=state,
            reason=reason,
            job=record.job if allocated else "",
        )

    def _state(self, record: NodeRecord) -> tuple[NodeState, str]:
        taken = _runs(record) or _is_claimed(record)
        if record.step and not taken and self._store.status(record.step) is None:
            return NodeState.DOWN, "Node unexpectedly failed"
        if record.drain:
            return (NodeState.DRAINING if taken else NodeState.DRAINED), record.drain
        return (NodeState.ALLOCATED if taken else NodeState.IDLE), ""

    def _record(self, node: str) -> NodeRecord:
        record = self._store.nodes().get(node)
        if record is None:
            msg = f"the local scheduler knows no node {node!r}"
            raise SchedulerError(msg)
        return record

    def _change(self, record: NodeRecord, **changes: object) -> NodeRecord:
        changed = msgspec.structs.replace(record, **changes)
        self._store.save_node(changed)
        return changed


def _runs(record: NodeRecord) -> bool:
    return record.holder is not None and is_alive(record.holder)


def _is_claimed(record: NodeRecord) -> bool:
    """Whether a living process has taken the node and started nothing on it yet."""
    return not record.step and record.claimant is not None and is_alive(record.claimant)
