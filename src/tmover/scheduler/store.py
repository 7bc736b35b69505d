"""The local scheduler's memory: small JSON files below one directory, shared by several processes.

    id                   tells this directory from a later one in its place
    lock                 held (flock) by whoever changes anything
    nodes/NODE.json      a `NodeRecord`
    jobs/JOB.json        a `Command`: what each of the job's nodes runs
    steps/STEP/          step.json (for the holder), status.json (from the holder)

A file is replaced whole, so that readers need no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from tmover.errors import ConfigError, SchedulerError
from tmover.process import ProcessId
from tmover.scheduler.fence import MARK

T = TypeVar("T")


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one node."""

    name: str
    address: str
    job: str = ""
    """The job that claimed it, "" if none."""
    claimant: ProcessId | None = None
    """Who claimed it; a claim without a step ends with its claimant."""
    step: str = ""
    """The last job step started on it, "" if none was."""
    holder: ProcessId | None = None
    """The process at the root of that step."""
    drain: str = ""
    """Why it is to be left, "" if it is not."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What every node of a job runs; the scheduler adds who the node is."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    logs: str
    """The directory of its logs, one file per node."""


class StepStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a job step ended."""

    code: int
    """Its exit code, negative for the signal that ended it."""
    reason: str = ""


class StepFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the holder of a step is told."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


class Store:
    """Reads and writes the files."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        try:
            for part in (root, root / "nodes", root / "jobs", root / "steps"):
                part.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            msg = f"cannot use {root} for the local scheduler's files: {why}"
            raise ConfigError(msg) from error
        self._id = self._read_id() or self._make_id()

    def is_gone(self) -> bool:
        """Return whether the directory was removed, with all that was known of the nodes."""
        return self._read_id() != self._id

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process that wants to change something."""
        try:
            fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            msg = f"cannot use {self.root / 'lock'}: {(error.strerror or str(error)).lower()}"
            raise SchedulerError(msg) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def nodes(self) -> dict[str, NodeRecord]:
        """Return all nodes by name."""
        files = (self.root / "nodes").glob("*.json")
        return {file.stem: self._read(file, NodeRecord) for file in files}

    def save_node(self, record: NodeRecord) -> None:
        """Replace a node's record."""
        self._write(self.root / "nodes" / f"{record.name}.json", record)

    def command(self, job: str) -> Command | None:
        """Return what the nodes of `job` run, or None if it was never registered."""
        file = self.root / "jobs" / f"{job}.json"
        return self._read(file, Command) if file.exists() else None

    def save_command(self, job: str, command: Command) -> None:
        """Keep what the nodes of `job` run."""
        self._write(self.root / "jobs" / f"{job}.json", command)

    def forget_command(self, job: str) -> None:
        """Forget what the nodes of `job` run."""
        (self.root / "jobs" / f"{job}.json").unlink(missing_ok=True)

    def commands(self) -> list[str]:
        """Return the jobs whose command is known."""
        return [file.stem for file in (self.root / "jobs").glob("*.json")]

    def new_step(self, node: str, step: StepFile, *, last: str) -> str:
        """Describe a new job step; return its id. Of the steps before, only `last` is kept."""
        numbers = [-1]
        for path in (self.root / "steps").glob(f"{node}.*"):
            numbers.append(int(path.suffix[1:]))
            if path.name != last:
                shutil.rmtree(path)
        name = f"{node}.{max(numbers) + 1}"
        (self.root / "steps" / name).mkdir(mode=0o700)
        mark = {MARK: self.mark(name)}
        self._write(self.step_file(name), msgspec.structs.replace(step, env={**step.env, **mark}))
        return name

    def mark(self, step: str) -> str:
        """Return what marks the processes of `step`."""
        return f"{self.root}:{step}"

    def step_file(self, step: str) -> pathlib.Path:
        """Return the file that describes `step`."""
        return self.root / "steps" / step / "step.json"

    def status(self, step: str) -> StepStatus | None:
        """Return how `step` ended, or None if nobody has said."""
        file = self.root / "steps" / step / "status.json"
        return self._read(file, StepStatus) if file.exists() else None

    def _read_id(self) -> bytes | None:
        """Return what the directory is known by; None if there is nothing, or no directory."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self.root / "id").read_bytes()
        return None

    def _make_id(self) -> bytes:
        """Name the directory, unless somebody else just has."""
        with self.locked():
            made = self._read_id()
            if made is None:
                made = secrets.token_hex(8).encode()
                write_whole(self.root / "id", made)
        return made

    def _read(self, file: pathlib.Path, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(file.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError) as error:
            msg = f"{file} is damaged: {error}; end the local jobs and remove it"
            raise SchedulerError(msg) from error

    @staticmethod
    def _write(file: pathlib.Path, value: msgspec.Struct) -> None:
        write_whole(file, msgspec.json.encode(value))


def write_whole(file: pathlib.Path, data: bytes, *, is_durable: bool = False) -> None:
    """Have the file hold this, for its owner only; if `is_durable`, whatever crashes after that.

    Raises `SchedulerError` if it cannot.
    """
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            if is_durable:
                out.flush()
                os.fsync(out.fileno())
        new.replace(file)
    except OSError as error:
        msg = f"cannot write {file}: {(error.strerror or str(error)).lower()}"
        raise SchedulerError(msg) from error
