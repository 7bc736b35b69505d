"""The lines of a journal: what they hold, how they are written, and what is wrong with one.

A line is `{"n": 3, "sum": "9f0c61aa", "entry": {...}}`. `n` counts the lines a job ever had, and
`sum` covers number and entry, so that a changed, lost or doubled line is seen. A file begins with
line 1, or with a snapshot that stands for all lines before it.
"""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, Union

import msgspec

from tmover.controller.sealed import seal, unseal
from tmover.core.events import AnyEvent, Record
from tmover.core.orders import Errand
from tmover.errors import JournalError, Refused

OLDER = ".1"
"""How the name of a job's file ends that a snapshot has taken the place of."""
MAX_LINE = 256 * 2**20
"""Bytes. The state of a job of 100,000 ranks takes less; what is longer is no line."""


class Settled(Record, frozen=True, kw_only=True):
    """The scheduler has carried out `effect`, so a restarted controller does not ask again."""

    effect: Errand
    note: str = ""
    """What came of it, for people; "" if just what was asked."""
    at: float = 0.0
    """The controller's wall clock in seconds."""


class Snapshot(Record, frozen=True, kw_only=True):
    """All that the lines before this one led to."""

    state: dict[str, Any]
    """The job, see `core.snapshot`."""
    effects: tuple[Errand, ...] = ()
    """What the scheduler was asked and had not yet done."""
    notes: tuple[str, ...] = ()
    since: float = 0.0
    """When the job was submitted."""
    at: float = 0.0
    """When the last line before was written."""


Entry = Union[AnyEvent, Settled]
"""What happens, and is written down before it is acted on."""
Kept = Union[AnyEvent, Settled, Snapshot]
"""What a line may hold."""


class Line(NamedTuple):
    """One line that is whole."""

    number: int
    entry: Kept


_encode = msgspec.json.Encoder().encode
_entries: msgspec.json.Decoder[Kept] = msgspec.json.Decoder(Kept)


def write(number: int, entry: Kept) -> bytes:
    """Return the line that holds the entry."""
    return seal(number, _encode(entry))


def check(entry: Entry) -> Entry:
    """Return the entry. Raises `Refused` if it could not be read back: JSON has no infinity."""
    try:
        _entries.decode(_encode(entry))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        msg = f"{type(entry).__name__} cannot be written down: {error}"
        raise Refused(msg) from error
    return entry


def read(line: bytes, job: str, after: int | None) -> Line:
    """Return what `line` holds; `after` is the number before it, None for a file's first line.

    Raises `ValueError` with what is wrong.
    """
    try:
        raw = unseal(line)
        if after is not None and raw.n != after + 1:
            reason = f"it calls itself line {raw.n}, not {after + 1}"
        elif not raw.is_whole:
            reason = "its sum does not fit its content"
        else:
            entry = _entries.decode(raw.body)
            reason = _misplaced(raw.n, entry, job, is_first=after is None)
            if not reason:
                return Line(raw.n, entry)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = str(error)
    raise ValueError(reason)


def _misplaced(number: int, entry: Kept, job: str, *, is_first: bool) -> str:
    """Return why a line that is whole cannot stand here, "" if it can."""
    if entry.job != job:
        return f"it is of job {entry.job}"
    if isinstance(entry, Snapshot):
        return "" if is_first else "it is a snapshot, which stands at the beginning only"
    if is_first and number != 1:
        return f"it calls itself line {number}, and those before it are missing"
    return ""


class Reader:
    """Reads one file line by line, and remembers how far it is good. Changes nothing."""

    def __init__(self, path: pathlib.Path, job: str) -> None:
        """Open the file. Raises `JournalError`."""
        self.path = path
        self.job = job
        self.place = 0
        """How many lines are good; the number of the last one, and their bytes."""
        self.number = 0
        self.size = 0
        self.first = 0
        """Bytes of the first line."""
        self.last = b""
        self.is_torn = False
        """Whether there is a last line without its end: it was never acted on."""
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise _unreadable(path, error) from error

    def lines(self) -> Iterator[Line]:
        """Yield what is there. Raises `JournalError` naming the line that is damaged."""
        with self._file as file:
            while raw := self._next(file):
                if raw.endswith(b"\n"):
                    yield self._take(raw)
                elif len(raw) == MAX_LINE:
                    raise damage(self.path, self.place + 1, self.job, "it has no end")
                else:
                    self.is_torn = True

    def close(self) -> None:
        """Read no more."""
        self._file.close()

    def _next(self, file: BinaryIO) -> bytes:
        try:
            return file.readline(MAX_LINE)
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def _take(self, raw: bytes) -> Line:
        try:
            line = read(raw, self.job, self.number if self.place else None)
        except ValueError as error:
            raise damage(self.path, self.place + 1, self.job, str(error)) from error
        self.place += 1
        self.size += len(raw)
        self.first = self.first or len(raw)
        self.last = raw
        self.number = line.number
        return line


def _unreadable(path: pathlib.Path, error: OSError) -> JournalError:
    return JournalError(f"cannot read the journal {path}: {error.strerror}")


def damage(path: pathlib.Path, place: int, job: str, reason: str) -> JournalError:
    """Return the error that names the damaged line, and the way out."""
    file = shlex.quote(str(path))
    if path.name.endswith(OLDER):
        text = f"{path}, line {place} is damaged: {reason}. No controller reads it: rm {file}"
        return JournalError(text)
    return JournalError(
        f"{path}, line {place} is damaged: {reason}. Put a good copy of the file in its place, or "
        f"give job {job} up (its ranks train on, unprotected): mv {file} {file}.damaged"
    )
