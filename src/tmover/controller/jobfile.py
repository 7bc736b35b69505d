"""One job's journal as a file: lines added at its end, all of it replaced by a snapshot.

What was written counts once it is on disk, under this name, and the claim is still ours. After
anything else the file is closed, and opened again before the next line: what a system call that
failed has left in memory is not believed. Opened again, the file must be as it was known to be
good; what is beyond is cut off.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from tmover.controller.disk import (
    Disk,
    Identity,
    identity,
    read_all,
    sync_directory,
    write_all,
    write_new,
)
from tmover.controller.lines import MAX_LINE, OLDER, Entry, Reader, Snapshot, write
from tmover.errors import JournalError


class Guard(Protocol):
    """Says whether the journals are ours."""

    def confirm(self) -> None:
        """Raise `Superseded` if they are not."""
        ...

    def confirm_if_due(self) -> None:
        """Confirm unless that was done a moment ago."""
        ...


class Good(NamedTuple):
    """What of a file is known to be good."""

    size: int = 0
    number: int = 0
    """Of the last line."""
    last: bytes = b""
    """The last line, by which the file is known again."""


class JobFile:
    """One job's journal. Only the controller that holds the claim has such."""

    def __init__(self, path: pathlib.Path, disk: Disk, guard: Guard, read: Reader | None) -> None:
        """Go on after what `read` has read, or begin with the first line."""
        self._path = path
        self._disk = disk
        self._guard = guard
        self._fd = -1
        self._file: Identity | None = None
        self._is_made = read is not None
        self._good = [Good() if read is None else Good(read.size, read.number, read.last)]
        """One, or two while it is open whether the file was replaced."""
        self._base = (0, 0) if read is None else (1, read.first)
        """Lines and bytes that no snapshot could replace."""
        self._lines = 0 if read is None else read.place

    @property
    def grown(self) -> tuple[int, int]:
        """Lines and bytes beyond the first line, which may be a snapshot."""
        return self._lines - self._base[0], self._good[0].size - self._base[1]

    @property
    def base(self) -> int:
        """Bytes of the first line."""
        return self._base[1]

    def append(self, entries: Sequence[Entry]) -> None:
        """Have the entries on disk before returning. Raises `JournalError` if they are not."""
        with self._changing("write"):
            self._guard.confirm_if_due()
            good = self._open()
            lines = [write(number, entry) for number, entry in enumerate(entries, good.number + 1)]
            data = b"".join(lines)
            write_all(self._disk, self._fd, data)
            self._disk.sync(self._fd)
            self._check_name()
            self._guard.confirm()
        if not self._lines:
            self._base = (1, len(lines[0]))
        self._lines += len(lines)
        self._good = [Good(good.size + len(data), good.number + len(lines), lines[-1])]

    def replace(self, snapshot: Snapshot) -> None:
        """Have the snapshot stand for all lines, and keep those as the older generation."""
        beside = self._path.with_name(f"{self._path.name}.new")
        with self._changing("replace"):
            good = self._open()  # which makes sure that what is on disk is what is replaced
            line = write(good.number + 1, snapshot)
            if len(line) > MAX_LINE:
                msg = f"{self._path}: a snapshot of {len(line)} bytes is longer than any line"
                raise JournalError(msg)
            write_new(self._disk, beside, line)
            self._guard.confirm()
            self._keep()
            after = Good(len(line), good.number + 1, line)
            self._good.append(after)
            self._disk.rename(beside, self._path)
            sync_directory(self._disk, self._path.parent)
        self.close()  # it is the older generation's by now
        self._settle(after)

    def take_over(self) -> None:
        """Have the lines in a file of their own: who writes to the old one does no harm."""
        beside = self._path.with_name(f"{self._path.name}.new")
        with self._changing("take over"):
            good = self._open()
            self._disk.seek(self._fd, 0)
            write_new(self._disk, beside, read_all(self._disk, self._fd, good.size))
            self._guard.confirm()
            self._disk.rename(beside, self._path)
            sync_directory(self._disk, self._path.parent)
        self.close()

    def close(self) -> None:
        """Let the file go; it is opened again for the next line."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                self._disk.close(fd)

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Open the file again before the next change if this one does not come to its end."""
        is_done = False
        try:
            yield
            is_done = True
        except OSError as error:
            msg = f"cannot {what} the journal {self._path}: {error.strerror}"
            raise JournalError(msg) from error
        finally:
            if not is_done:
                self.close()

    def _open(self) -> Good:
        """Open the file and go to its end, unless it is open there; return what it holds."""
        if self._fd >= 0:
            return self._good[0]
        is_new = not self._is_made
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0)
        self._fd = self._disk.open(self._path, flags)
        self._is_made = True
        status = self._disk.status(self._fd)
        self._file = identity(status)
        good = next((good for good in self._good if self._has(status.st_size, good)), None)
        if good is None:
            msg = (
                f"cannot go on in the journal {self._path}: it has lost lines, or was replaced. "
                "Put the file back, or start the controller anew"
            )
            raise JournalError(msg)
        self._settle(good)
        if status.st_size > good.size:
            self._disk.truncate(self._fd, good.size)
            self._disk.sync(self._fd)
        sync_directory(self._disk, self._path.parent)
        self._disk.seek(self._fd, good.size)
        return good

    def _has(self, size: int, good: Good) -> bool:
        """Return whether the open file begins with what is known to be good."""
        start = good.size - len(good.last)
        if size < good.size:
            return False
        self._disk.seek(self._fd, start)
        return read_all(self._disk, self._fd, len(good.last)) == good.last

    def _settle(self, good: Good) -> None:
        """Note which of two the file is."""
        if len(self._good) > 1 and good == self._good[-1]:
            self._lines, self._base = 1, (1, good.size)
        self._good = [good]

    def _keep(self) -> None:
        """Give the file a second name, as the older generation, where names can be given."""
        kept, spare = (self._path.with_name(self._path.name + end) for end in (OLDER, ".old"))
        try:
            self._disk.unlink(spare)
            self._disk.link(self._path, spare)
        except OSError:  # a file system without hard links: then none is kept
            self._disk.unlink(kept)
            return
        self._disk.rename(spare, kept)

    def _check_name(self) -> None:
        """Raise `JournalError` unless the open file is the one that is found under the name."""
        if identity(self._disk.look(self._path)) != self._file:
            msg = f"the journal {self._path} was moved or replaced while it was written"
            raise JournalError(msg)
