"""The system calls that journals are kept with: one object, so that a test can fail any of them."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
from typing import NamedTuple

_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems answer that write directories at once, or cannot be asked to."""


class Identity(NamedTuple):
    """A file, whatever it is called."""

    device: int
    inode: int


class Disk:
    """Files, as the operating system has them. Every call is one system call."""

    def open(self, path: pathlib.Path, flags: int) -> int:
        """Open; a file that is made is its owner's alone."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """Close."""
        os.close(fd)

    def read(self, fd: int, size: int) -> bytes:
        """Read what is there, up to so many bytes."""
        return os.read(fd, size)

    def write(self, fd: int, data: memoryview) -> int:
        """Write, perhaps only a part; return how much."""
        return os.write(fd, data)

    def seek(self, fd: int, place: int) -> None:
        """Go to a place, counted from the beginning."""
        os.lseek(fd, place, os.SEEK_SET)

    def truncate(self, fd: int, size: int) -> None:
        """Cut what is beyond."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Have everything that was written on disk."""
        os.fsync(fd)

    def status(self, fd: int) -> os.stat_result:
        """Return what the system knows of an open file."""
        return os.fstat(fd)

    def look(self, path: pathlib.Path) -> os.stat_result:
        """Return what the system knows of a file."""
        return path.stat()

    def rename(self, path: pathlib.Path, to: pathlib.Path) -> None:
        """Rename over whatever is there."""
        path.replace(to)

    def link(self, path: pathlib.Path, to: pathlib.Path) -> None:
        """Give the file another name, which must be free."""
        to.hardlink_to(path)

    def unlink(self, path: pathlib.Path) -> None:
        """Remove, if it is there."""
        path.unlink(missing_ok=True)

    def touch(self, path: pathlib.Path) -> None:
        """Set the time of a file to now, as the machine has it that keeps the file."""
        os.utime(path)

    def lock(self, fd: int) -> None:
        """Lock the file against others, or fail at once."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def identity(status: os.stat_result) -> Identity:
    """Return which file it is."""
    return Identity(status.st_dev, status.st_ino)


def write_all(disk: Disk, fd: int, data: bytes) -> None:
    """Write all of it, from where the file stands."""
    view = memoryview(data)
    while view:
        view = view[disk.write(fd, view) :]


def read_all(disk: Disk, fd: int, size: int) -> bytes:
    """Read so many bytes, or less if the file ends, from where it stands."""
    parts: list[bytes] = []
    while size and (part := disk.read(fd, min(size, 2**20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def sync_directory(disk: Disk, path: pathlib.Path) -> None:
    """Have on disk what the directory's files are called."""
    fd = disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.sync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        disk.close(fd)


def write_new(disk: Disk, path: pathlib.Path, data: bytes) -> None:
    """Write a file anew, and have it on disk; its name is not yet."""
    fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, data)
        disk.sync(fd)
    finally:
        disk.close(fd)
