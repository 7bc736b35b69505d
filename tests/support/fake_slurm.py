"""A Slurm that is a few dictionaries: it reads the commands and prints what Slurm 22.05 prints.

`tests/slurm/test_contract.py` holds it against a real slurmctld. Nodes go to one job at a time. A
command or an option it does not know fails the test.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
from collections.abc import Callable

from tmover.scheduler import hostlist
from tmover.scheduler.slurm.run import Command, Completed

ADMINISTRATOR = pwd.getpwuid(os.geteuid()).pw_name
"""Whoever runs the tests, as for a real slurmctld that they start."""
_DOWN = "Unable to contact slurm controller (connect failure)"
_INDEX = "Job update not available right now, the DB index is being set, try again in a bit for job"
_WITH_VALUE = {
    "-N": "nodes", "--nodes": "nodes", "-J": "name", "--job-name": "name", "--comment": "comment",
    "-o": "output", "--output": "output", "-t": "time", "--time": "time", "--exclude": "exclude",
    "-p": "partition", "--partition": "partition", "--signal": "signal", "--export": "export",
    "--ntasks": "ntasks", "--ntasks-per-node": "ntasks_per_node",
}  # fmt: skip
_FLAGS = {
    "--exclusive", "-k", "--no-kill", "--no-kill=off", "-H", "--hold", "--parsable", "--no-shell",
    "--no-requeue", "--",
}  # fmt: skip


class NotFaked(AssertionError):
    """The fake was asked something that it does not know how Slurm answers."""


@dataclasses.dataclass
class FakeNode:
    name: str
    flags: list[str] = dataclasses.field(default_factory=list)
    is_down: bool = False
    reason: str = "none"
    reason_user: str = "Unknown"


@dataclasses.dataclass
class FakeJob:
    id: str
    user: str
    name: str
    wanted: int
    comment: str = "(null)"
    state: str = "PENDING"
    reason: str = "None"
    nodes: list[str] = dataclasses.field(default_factory=list)
    exclude: list[str] = dataclasses.field(default_factory=list)
    batch_host: str = "n/a"
    has_script: bool = True
    is_held: bool = False
    is_no_kill: bool = False
    is_resized: bool = False
    restarts: int = 0
    end_time: str = "N/A"
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    script: tuple[str, ...] = ()


class FakeSlurm:
    """One cluster with one partition, `main`. It is the `Run` of a `SlurmClient`."""

    def __init__(self, nodes: int = 4, *, has_accounting: bool = False) -> None:
        names = [f"node{number}" for number in range(1, nodes + 1)]
        self.nodes = {name: FakeNode(name) for name in names}
        self.jobs: dict[str, FakeJob] = {}
        self.reservations: list[str] = []
        """Lines of `scontrol -o show res`."""
        self.commands: list[Command] = []
        self.is_up = True
        self.has_accounting = has_accounting
        """Without it, a job can be resized once only."""
        self.may_shrink = True

    def __call__(self, command: Command) -> Completed:
        self.commands.append(command)
        name, *args = command.argv
        programs: dict[str, Callable[[list[str], str, Command], Completed]] = {
            "squeue": self._squeue,
            "sinfo": self._sinfo,
            "scontrol": self._scontrol,
            "sbatch": self._submit,
            "salloc": self._submit,
            "scancel": self._scancel,
        }
        if name not in programs:
            raise NotFaked(str(command))
        if not self.is_up:
            return self._is_down(args)
        self.schedule()
        completed = programs[name](args, command.user or ADMINISTRATOR, command)
        self.schedule()
        return completed

    def schedule(self) -> None:
        """Start what waits and fits."""
        for job in self.jobs.values():
            if job.state != "PENDING" or job.is_held:
                continue
            free = [n for n in self.nodes if self._is_free(n) and n not in job.exclude]
            if len(free) < job.wanted:
                job.reason = "Resources"
                continue
            job.nodes, job.state, job.reason = free[: job.wanted], "RUNNING", "None"
            job.batch_host = job.nodes[0] if job.has_script else "localhost"
            job.end_time = "4102444800"

    def lose(self, name: str) -> None:
        """Have slurmctld find that a node is DOWN, as it does when it was silent for long."""
        self.nodes[name].is_down = True
        self.nodes[name].flags = ["not_responding"]
        self.nodes[name].reason = "Not responding"
        for job in self.jobs.values():
            if job.state != "RUNNING" or name not in job.nodes:
                continue
            job.nodes = [node for node in job.nodes if node != name]
            job.is_resized = True
            if not job.is_no_kill:
                job.state, job.reason, job.nodes = "PENDING", "BeginTime", []
                job.restarts, job.is_held = job.restarts + 1, True

    def drain(self, name: str, reason: str = "to be serviced") -> None:
        """Have an administrator drain a node."""
        self.nodes[name].flags = ["drain"]
        self.nodes[name].reason, self.nodes[name].reason_user = reason, ADMINISTRATOR

    def reserve(self, name: str, nodes: str, *, start: float, minutes: int) -> None:
        """Make a reservation for maintenance."""
        end = int(start) + 60 * minutes
        self.reservations.append(
            f"ReservationName={name} StartTime={int(start)} EndTime={end} Duration=00:01:00"
            f" Nodes={nodes} NodeCnt=2 CoreCnt=16 Features=(null) PartitionName=(null)"
            " Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=16 Users=root Groups=(null)"
            " Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) Watts=n/a"
            " MaxStartDelay=(null)"
        )

    def end(self, job_id: str, state: str) -> None:
        """Have a job end."""
        self.jobs[job_id].state, self.jobs[job_id].end_time = state, "1767225600"

    def forget(self, job_id: str) -> None:
        """Have a job be gone from slurmctld's memory, as it is some minutes after its end."""
        del self.jobs[job_id]

    def _is_free(self, name: str) -> bool:
        node = self.nodes[name]
        return not (node.is_down or "drain" in node.flags or self._holds(name))

    def _holds(self, name: str) -> bool:
        return any(job.state == "RUNNING" and name in job.nodes for job in self.jobs.values())

    @staticmethod
    def _is_down(args: list[str]) -> Completed:
        if args == ["ping"]:
            return Completed(code=1, out="Slurmctld(primary) at vm is DOWN\n" + "*" * 41 + "\n")
        return _fails(_DOWN)

    def _squeue(self, args: list[str], user: str, command: Command) -> Completed:
        options, fields, mark = _table(args, ["-h", "-a", "-r", "-t", "all"], str(command))
        users = None
        if options:
            if len(options) != 2 or options[0] != "-u":
                raise NotFaked(str(command))
            users = options[1].split(",")
        rows = [
            {
                "JobID": job.id,
                "JobArrayID": job.id,
                "UserName": job.user,
                "State": job.state,
                "NodeList": hostlist.fold(job.nodes),
                "BatchHost": job.batch_host,
                "RestartCnt": str(job.restarts),
                "NumNodes": str(len(job.nodes) or job.wanted),
                "Reason": job.reason,
                "EndTime": job.end_time,
                "Partition": "main",
                "Name": job.name,
                "Comment": job.comment,
            }
            for job in self.jobs.values()
            if users is None or job.user in users
        ]
        return _says("".join(_row(row, fields, mark) for row in rows))

    def _sinfo(self, args: list[str], user: str, command: Command) -> Completed:
        options, fields, mark = _table(args, ["-h", "-a", "-N"], str(command))
        if options:
            raise NotFaked(str(command))
        rows = [
            {
                "NodeList": node.name,
                "NodeAddr": "127.0.0.1",
                "StateComplete": "+".join([self._base(node), *node.flags]),
                "User": node.reason_user,
                "Reason": node.reason,
            }
            for node in self.nodes.values()
        ]
        return _says("".join(_row(row, fields, mark) for row in rows))

    def _base(self, node: FakeNode) -> str:
        if node.is_down:
            return "down"
        return "allocated" if self._holds(node.name) else "idle"

    def _scontrol(self, args: list[str], user: str, command: Command) -> Completed:
        match args:
            case ["ping"]:
                return _says("Slurmctld(primary) at vm is UP\n")
            case ["-o", "show", "res"]:
                lines = self.reservations or ["No reservations in the system"]
                return _says("\n".join(lines) + "\n")
            case ["update", job, nodes] if job.startswith("JobId=") and "NodeList=" in nodes:
                return self._resize(job.removeprefix("JobId="), nodes.partition("=")[2], user)
            case ["update", name, "State=DRAIN", reason] if name.startswith("NodeName="):
                return self._drain(name.partition("=")[2], reason.partition("=")[2], user)
            case ["update", name, "State=RESUME"] if name.startswith("NodeName="):
                return self._resume(name.partition("=")[2], user)
        raise NotFaked(str(command))

    def _resize(self, job_id: str, nodes: str, user: str) -> Completed:
        job, keep = self.jobs.get(job_id), hostlist.expand(nodes)
        if job is None:
            what = f"Could not load state information for job {job_id}"
            return _fails(f"scontrol: error: {what}: Invalid job id specified")
        if user not in (job.user, ADMINISTRATOR):
            return _fails(f"Invalid user id for job {job_id}")
        if job.state != "RUNNING":
            return _fails(f"Job has already finished for job {job_id}")
        if job.is_resized and not self.has_accounting:
            return _fails(f"{_INDEX} {job_id}")
        if not self.may_shrink:
            return _fails(f"Requested operation is presently disabled for job {job_id}")
        batch_host_goes = job.has_script and job.batch_host not in keep
        if batch_host_goes or not set(keep) <= set(job.nodes):
            return _fails(f"Invalid node name specified for job {job_id}")
        job.nodes, job.is_resized = keep, True
        return _says("")

    def _drain(self, name: str, reason: str, user: str) -> Completed:
        if user != ADMINISTRATOR:
            return _fails("slurm_update error: Invalid user id")
        if name not in self.nodes:
            return _fails("slurm_update error: Invalid node name specified")
        node = self.nodes[name]
        node.flags = [*[flag for flag in node.flags if flag != "drain"], "drain"]
        node.reason, node.reason_user = reason, user
        return _says("")

    def _resume(self, name: str, user: str) -> Completed:
        if user != ADMINISTRATOR:
            return _fails("slurm_update error: Invalid user id")
        if name not in self.nodes:
            return _fails("slurm_update error: Invalid node name specified")
        node = self.nodes[name]
        if not node.is_down and "drain" not in node.flags:
            return _fails("slurm_update error: Invalid node state specified")
        self.nodes[name] = FakeNode(name)
        return _says("")

    def _submit(self, args: list[str], user: str, command: Command) -> Completed:
        options, flags, rest = _options(args, str(command))
        program, job_id = command.argv[0], str(len(self.jobs) + 1)
        if options.get("partition", "main") != "main":
            what = "Batch job submission failed" if rest else "Unable to allocate resources"
            return _fails(f"{program}: error: {what}: Invalid partition name specified")
        job = FakeJob(
            id=job_id,
            user=user,
            name=options.get("name", rest[0].rpartition("/")[2] if rest else "no-shell"),
            wanted=int(options.get("nodes", "1")),
            comment=options.get("comment", "(null)"),
            exclude=hostlist.expand(options.get("exclude", "")),
            has_script=bool(rest),
            is_held=bool(flags & {"-H", "--hold"}),
            is_no_kill=bool(flags & {"-k", "--no-kill"}),
            env=dict(command.env or {}),
            script=tuple(rest),
        )
        job.reason = "JobHeldUser" if job.is_held else "None"
        self.jobs[job_id] = job
        if program == "salloc":
            self.schedule()
            if job.state != "RUNNING":
                self.end(job_id, "CANCELLED")
                return Completed(code=-9, timed_out=True)
            return Completed(code=0, err=f"salloc: Granted job allocation {job_id}\n")
        return _says(f"{job_id}\n")

    def _scancel(self, args: list[str], user: str, command: Command) -> Completed:
        ids = [arg for arg in args if re.fullmatch(r"[0-9]+(\.[0-9]+)?", arg)]
        signal = [arg for arg in args if arg.startswith("--signal=")]
        if len(ids) + len(signal) != len(args):
            raise NotFaked(str(command))
        errors = []
        for each in ids:
            job = self.jobs.get(each)
            if job is None:
                continue  # Slurm says nothing of what it does not know, nor of steps that ended
            if user not in (job.user, ADMINISTRATOR):
                errors.append((210, f"job id {each}: Access/permission denied"))
            elif signal and job.state == "PENDING":
                return Completed(code=-15, timed_out=True)
            elif not signal and job.state in ("PENDING", "RUNNING"):
                self.end(each, "CANCELLED")
        text = "".join(f"scancel: error: Kill job error on {words}\n" for _, words in errors)
        return Completed(code=errors[0][0] if errors else 0, err=text)


def _table(args: list[str], expected: list[str], command: str) -> tuple[list[str], list[str], str]:
    """Return the other options of a command that prints a table, its fields and their mark."""
    if args[: len(expected)] != expected or args[-2] != "-O":
        raise NotFaked(command)
    fields = [field.split(":", 1) for field in args[-1].split(",")]
    return args[len(expected) : -2], [field[0] for field in fields], fields[0][1]


def _row(row: dict[str, str], fields: list[str], mark: str) -> str:
    return "".join(row[field] + mark for field in fields) + "\n"


def _options(args: list[str], command: str) -> tuple[dict[str, str], set[str], list[str]]:
    """Return the options with a value, those without, and script and arguments."""
    values: dict[str, str] = {}
    flags: set[str] = set()
    rest = list(args)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        option, has_value, value = _split(word)
        if option in _WITH_VALUE:
            values[_WITH_VALUE[option]] = value if has_value else rest.pop(0)
        elif word in _FLAGS:
            flags.add(word)
            if word == "--":
                break
        else:
            raise NotFaked(command)
    return values, flags, rest


def _split(option: str) -> tuple[str, bool, str]:
    """Return an option's name, and its value if that is part of the same word."""
    if option.startswith("--"):
        name, equals, value = option.partition("=")
        return name, bool(equals), value
    return option[:2], len(option) > 2, option[2:]


def _says(text: str) -> Completed:
    return Completed(code=0, out=text)


def _fails(words: str, code: int = 1) -> Completed:
    return Completed(code=code, err=f"{words}\n")
