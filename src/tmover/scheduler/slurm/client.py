"""The few things tmover asks of Slurm, each with one command, all through `_call`."""

from __future__ import annotations

import collections
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tmover.errors import SchedulerError
from tmover.scheduler.slurm import commands
from tmover.scheduler.slurm.commands import JobInfo, NodeDetail, Reservation
from tmover.scheduler.slurm.refusals import (
    refusal,
    resize_refusal,
    said,
    unreachable,
)
from tmover.scheduler.slurm.run import STDIN, Command, Completed, Run, run_command, scrubbed

_MINUTE_S = 60.0
_GATE_S = 1.0
"""A slurmctld that answered this long ago is not asked again whether it is there."""
_PING_TIMEOUT_S = 5.0
_GONE = ("Invalid job id specified", "already completing or completed", "already finished")
_NOT_DRAINED = "Invalid node state specified"


class Calls:
    """Counts the requests that slurmctld was sent, as `sdiag` there would. Threads may share it."""

    def __init__(self) -> None:
        self.total = 0
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._lock = threading.Lock()

    def add(self, rpcs: int, now: float) -> None:
        """Count what one command sent."""
        with self._lock:
            self.total += rpcs
            self._recent.append((now, rpcs))
            self._forget(now)

    def per_minute(self, now: float) -> int:
        """Return how many there were in the last minute."""
        with self._lock:
            self._forget(now)
            return sum(rpcs for _, rpcs in self._recent)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - _MINUTE_S:
            self._recent.popleft()


class SlurmClient:
    """Slurm, as `user` sees it and may change it; None for the user of this process.

    Raises `SlurmUnreachable` if nothing is known, `SlurmDenied` if the user has no right,
    `SlurmRefused` if asking again will not help, another `SchedulerError` if the commands are
    missing or their output makes no sense.
    """

    def __init__(
        self,
        run: Run = run_command,
        *,
        user: str | None = None,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls = Calls()
        self._run = run
        self._user = user
        self._timeout_s = timeout_s
        self._clock = clock
        self._answered_at = float("-inf")

    def rpcs_per_minute(self, now: float | None = None) -> int:
        """Return how many requests slurmctld got from this client in the last minute."""
        return self.calls.per_minute(self._clock() if now is None else now)

    def ping(self) -> bool:
        """Return whether slurmctld is there. One that hangs counts as not there."""
        return commands.parse_ping(self._ping()[1].out)

    def jobs(self, users: Collection[str] | None = None) -> list[JobInfo]:
        """Return all jobs of `users`, of everybody for None, with those that ended of late.

        A job that is not among them ended some minutes ago, or is hidden from this user.
        """
        if users is not None and not users:
            return []
        mark = commands.new_mark()
        completed = self._call(commands.squeue_argv(mark, users), rpcs=2)
        return commands.parse_squeue(completed.out, mark)

    def nodes(self) -> list[NodeDetail]:
        """Return all nodes of all partitions, sorted by name."""
        mark = commands.new_mark()
        return commands.parse_sinfo(self._call(commands.sinfo_argv(mark), rpcs=2).out, mark)

    def reservations(self) -> list[Reservation]:
        """Return all reservations, those to come included."""
        completed = self._call(commands.reservations_argv(), rpcs=1)
        return commands.parse_reservations(completed.out)

    def submit(
        self,
        options: Sequence[str],
        script: pathlib.Path | str,
        *,
        env: Mapping[str, str],
        cwd: pathlib.Path,
        args: Sequence[str] = (),
    ) -> str:
        """Submit a script with this environment, less an enclosing job's; return the job's id.

        A script that is a `str` is its text: then no file is needed that the user can read.

        Not idempotent: after `SlurmUnreachable`, look for the job before submitting it again.
        """
        text = script if isinstance(script, str) else ""
        argv = commands.sbatch_argv(options, STDIN if text else str(script), args)
        completed = self._call(argv, rpcs=1, env=scrubbed(env), cwd=cwd, stdin=text)
        return commands.parse_sbatch(completed.out)

    def cancel(self, job_ids: Collection[str], *, signal: str | None = None) -> None:
        """Cancel jobs, or signal all their job steps. Jobs that are over are left alone.

        A signal is for running jobs: for one that waits, `scancel` tries again for minutes.
        """
        if job_ids:
            argv = commands.scancel_argv(sorted(job_ids), signal=signal)
            rpcs = len(job_ids) + (0 if signal is None else 2)
            self._call(argv, rpcs=rpcs, harmless=_GONE)

    def shrink(self, job: str, keep: Sequence[str]) -> None:
        """Have `job` keep only the nodes in `keep`; what it runs on the others is killed at once.

        Raises `ResizeRefused` if they stay in the job. Not to be repeated: see `is_final` there.
        """
        self._call(commands.shrink_argv(job, keep), rpcs=3, refused=resize_refusal)

    def set_comment(self, job: str, comment: str) -> None:
        """Replace a job's comment, which its owner may do."""
        self._call(commands.comment_argv(job, comment), rpcs=1)

    def drain(self, node: str, reason: str) -> None:
        """Drain a node, which takes an administrator. Its `reason` is replaced if it is drained."""
        self._call(commands.drain_argv(node, reason), rpcs=1)

    def resume(self, node: str) -> None:
        """Undo `drain`. A node that is in service is left as it is."""
        self._call(commands.resume_argv(node), rpcs=1, harmless=(_NOT_DRAINED,))

    def _call(
        self,
        argv: Sequence[str],
        *,
        rpcs: int,
        env: Mapping[str, str] | None = None,
        cwd: pathlib.Path | None = None,
        stdin: str = "",
        timeout_s: float | None = None,
        harmless: tuple[str, ...] = (),
        refused: Callable[[Command, Completed], SchedulerError] = refusal,
    ) -> Completed:
        """Run a command behind the gate, and count it. `harmless` are refusals that are none."""
        command = self._command(argv, env=env, cwd=cwd, stdin=stdin, timeout_s=timeout_s)
        self._pass_gate(command)
        self.calls.add(rpcs, self._clock())
        completed = self._run(command)
        if completed.code != 0 or completed.timed_out:
            if not completed.timed_out and _is_harmless(completed, harmless):
                return completed
            self._answered_at = float("-inf")
            raise refused(command, completed)
        self._answered_at = self._clock()
        return completed

    def _pass_gate(self, command: Command) -> None:
        """Ask first whether slurmctld is there: that takes 10 ms, a command without it 9 s."""
        if self._clock() - self._answered_at < _GATE_S:
            return
        ping, answer = self._ping()
        if not commands.parse_ping(answer.out):
            words = f"no answer to it within {ping.timeout_s:g} s" if answer.timed_out else ""
            raise unreachable(command, f"not run, since `{ping}` says: {words or said(answer)}")
        self._answered_at = self._clock()

    def _ping(self) -> tuple[Command, Completed]:
        timeout_s = min(_PING_TIMEOUT_S, self._timeout_s)
        command = self._command(commands.ping_argv(), timeout_s=timeout_s)
        self.calls.add(1, self._clock())
        return command, self._run(command)

    def _command(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: pathlib.Path | None = None,
        stdin: str = "",
        timeout_s: float | None = None,
    ) -> Command:
        return Command(
            argv=tuple(argv),
            env=env,
            cwd=None if cwd is None else str(cwd),
            stdin=stdin,
            user=self._user,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )


def _is_harmless(completed: Completed, harmless: tuple[str, ...]) -> bool:
    """Return whether every line of the answer says no more than that there was nothing to do."""
    lines = [line for line in completed.err.splitlines() if line.strip()]
    return bool(lines) and all(any(text in line for text in harmless) for line in lines)
