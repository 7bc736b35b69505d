"""What the controller has heard, on disk before it is acted on.

One file per job, one JSON object per line: `{"n": 3, "sum": "9f0c61aa", "entry": {...}}`. `n`
counts lines and `sum` covers number and entry, so that a changed, lost or doubled line is seen.
Feeding the entries to `decide` in order yields the job as it was. Nothing is ever rewritten; a last
line without its end was never acted on, and is dropped. Any other damage is refused: a decision
that was sent must not be taken back, and half a journal would do that.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pathlib
import re
import zlib
from collections.abc import Sequence
from typing import Union

import msgspec

from tmover.controller.keys import private_directory
from tmover.core.events import AnyEvent, Record
from tmover.core.orders import Errand
from tmover.errors import ConfigError, JournalError

logger = logging.getLogger(__name__)


class Settled(Record, frozen=True, kw_only=True):
    """The scheduler has carried out `effect`, so a restarted controller does not ask again."""

    effect: Errand
    note: str = ""
    """What came of it, for people; "" if just what was asked."""
    at: float = 0.0
    """The controller's wall clock in seconds."""


Entry = Union[AnyEvent, Settled]

_NAME = re.compile(r"[0-9]+|slurm[0-9]+(?:r[0-9]+)?")
"""A job's: a number of ours, or Slurm's id and restart count."""


class _Line(msgspec.Struct, frozen=True):
    n: int
    sum: str
    entry: msgspec.Raw


_encode = msgspec.json.Encoder().encode
_entries: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
_lines = msgspec.json.Decoder(_Line)


class Journal:
    """The journals of all jobs of one controller. Only one process can hold them."""

    def __init__(self, directory: pathlib.Path) -> None:
        """Take the journals in `directory`, made if missing.

        Raises `ConfigError` if another controller has them.
        """
        self._directory = private_directory(directory)
        self._files: dict[str, _File] = {}
        self._lock = _lock(self._directory / "lock")

    def jobs(self) -> list[str]:
        """Return the ids of all jobs, in the order of their numbers."""
        names = (p.stem for p in self._directory.glob("*.jsonl") if _NAME.fullmatch(p.stem))
        return sorted(names, key=lambda name: [int(n) for n in re.findall("[0-9]+", name)])

    def next_id(self) -> str:
        """Return an id that no job here ever had, one whose journal was moved away included."""
        found = (re.match(r"(\d+)\.jsonl", path.name) for path in self._directory.iterdir())
        return str(max((int(match[1]) for match in found if match), default=0) + 1)

    def replay(self, job: str) -> list[Entry]:
        """Return the job's entries, and make its journal ready to go on.

        Raises `JournalError` naming the line that is damaged and the way out.
        """
        path = self._path(job)
        try:
            data = path.read_bytes()
        except OSError as error:
            msg = f"cannot read the journal {path}: {error.strerror}"
            raise JournalError(msg) from error
        *lines, rest = data.split(b"\n")
        entries = [_read(path, number, line, job) for number, line in enumerate(lines, start=1)]
        if rest:
            logger.warning("dropped the torn last line %s of %s", len(lines) + 1, path)
        if job in self._files:
            self._files[job].close()
        size = len(data) - len(rest)
        self._files[job] = _File(path, size=size, lines=len(lines), torn=bool(rest))
        return entries

    def append(self, job: str, entries: Sequence[Entry]) -> None:
        """Have the entries on disk before returning.

        Raises `JournalError` if they are not; then none of them is in the journal.
        """
        if job not in self._files:
            self._files[job] = _File(self._path(job), size=0, lines=0)
        self._files[job].append(entries)

    def close(self) -> None:
        """Let another controller have the journals."""
        for file in self._files.values():
            file.close()
        os.close(self._lock)

    def _path(self, job: str) -> pathlib.Path:
        return self._directory / f"{job}.jsonl"


class _File:
    """One job's journal, of which `size` bytes in `lines` lines are good."""

    def __init__(self, path: pathlib.Path, *, size: int, lines: int, torn: bool = False) -> None:
        self._path = path
        self._size = size
        self._count = lines
        self._torn = torn
        self._fd = -1

    def append(self, entries: Sequence[Entry]) -> None:
        numbered = enumerate(entries, start=self._count + 1)
        data = b"".join(_write(number, entry) for number, entry in numbered)
        try:
            self._open()
            if self._torn:
                os.ftruncate(self._fd, self._size)
            self._torn = True
            _write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError as error:
            msg = f"cannot write the journal {self._path}: {error.strerror}"
            raise JournalError(msg) from error
        self._torn = False
        self._size += len(data)
        self._count += len(entries)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        if self._fd >= 0:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _write(number: int, entry: Entry) -> bytes:
    body = _encode(entry)
    return b'{"n":%d,"sum":"%s","entry":%s}\n' % (number, _sum(number, body), body)


def _read(path: pathlib.Path, number: int, line: bytes, job: str) -> Entry:
    """Return the entry in `line`, or raise `JournalError`."""
    try:
        read = _lines.decode(line)
        body = bytes(read.entry)
        if read.n != number:
            reason = f"it calls itself line {read.n}"
        elif read.sum.encode() != _sum(number, body):
            reason = "its sum does not fit its content"
        else:
            entry = _entries.decode(body)
            if entry.job == job:
                return entry
            reason = f"it is of job {entry.job}"
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = str(error)
    msg = (
        f"{path}, line {number} is damaged: {reason}. Put a good copy of the file in its place, or "
        f"give job {job} up (its ranks train on, unprotected): mv {path} {path}.damaged"
    )
    raise JournalError(msg)


def _sum(number: int, body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(b"%d:%s" % (number, body))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _lock(path: pathlib.Path) -> int:
    """Return the descriptor that holds the lock, in which the holder's pid stands for people."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        msg = f"cannot use {path}: {error.strerror}"
        raise ConfigError(msg) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 20, 0).decode(errors="replace").strip()
        os.close(fd)
        msg = (
            f"another controller (process {holder or 'unknown'}) works on {path.parent}: "
            "stop it, or choose another state directory"
        )
        raise ConfigError(msg) from error
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        os.close(fd)
        msg = f"cannot write {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(msg) from error
    return fd
