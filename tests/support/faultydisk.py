"""A disk that fails or crashes before one system call, and then loses what was not synced.

The files are real. What a power cut may leave is made of them: of the data since the last sync of a
file nothing, a half, all, or zeros in its place; of the names since the last sync of the directory
the first so many changes.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pathlib
from collections.abc import Callable

from tmover.controller.disk import Disk, Identity, identity


class Crash(BaseException):
    """The machine is gone."""


class Data(enum.Enum):
    """What a power cut leaves of data that was not synced."""

    NONE = 0
    HALF = 1
    ALL = 2
    ZEROS = 3


class Quick(Disk):
    """Files that no power cut comes to."""

    def sync(self, fd: int) -> None:
        pass


class FaultyDisk(Disk):
    """Before call `at`, counted from 1, it raises `Crash`, or `error` once."""

    def __init__(self, directory: pathlib.Path, at: int, error: int | None = None) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._shadow = directory.with_name(f"{directory.name}.shadow")
        self._shadow.mkdir(exist_ok=True)
        self._at, self._error = at, error
        self._fds: set[int] = set()
        self._synced: dict[Identity, bytes] = {}
        """What is on disk of files that were changed since their last sync."""
        self._undo: list[Callable[[], object]] = []
        """How to take back the names that were changed since the directory was synced."""
        self.calls = 0

    @property
    def has_struck(self) -> bool:
        return self.calls >= self._at

    def cut(self, data: Data, names: int) -> None:
        """Leave what a power cut may leave: of the names, the first so many changes."""
        for fd in list(self._fds):
            self.close_quietly(fd)
        for path in [p for p in self._directory.iterdir() if p.is_file()]:
            synced = self._synced.get(identity(path.stat()))
            if synced is not None:
                _spoil(path, synced, data)
        for undo in reversed(self._undo[names:]):
            undo()
        for path in self._shadow.iterdir():
            path.unlink()
        self._shadow.rmdir()

    @property
    def names_changed(self) -> int:
        return len(self._undo)

    def close_quietly(self, fd: int) -> None:
        self._fds.discard(fd)
        with contextlib.suppress(OSError):
            os.close(fd)

    # --- the calls --------------------------------------------------------------------------------

    def open(self, path: pathlib.Path, flags: int) -> int:
        self._step()
        is_new = flags & os.O_CREAT and not path.exists()
        if flags & os.O_TRUNC and not is_new:
            self._remember(identity(path.stat()), path.read_bytes())
        fd = super().open(path, flags)
        self._fds.add(fd)
        if is_new:
            self._remember(identity(os.fstat(fd)), b"")
            self._undo.append(path.unlink)
        return fd

    def close(self, fd: int) -> None:
        self._step(closing=fd)
        self._fds.discard(fd)
        super().close(fd)

    def read(self, fd: int, size: int) -> bytes:
        self._step()
        return super().read(fd, size)

    def write(self, fd: int, data: memoryview) -> int:
        self._remember(identity(os.fstat(fd)), _content(fd))
        part = data[: (len(data) + 1) // 2]  # so that each line takes more than one call
        if self.calls + 1 == self._at and self._error is None:
            super().write(fd, part[: len(part) // 2])
        self._step()
        return super().write(fd, part)

    def seek(self, fd: int, place: int) -> None:
        self._step()
        super().seek(fd, place)

    def truncate(self, fd: int, size: int) -> None:
        self._step()
        self._remember(identity(os.fstat(fd)), _content(fd))
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._step()  # and no more: what is on disk is what this class remembers
        if pathlib.Path(f"/proc/self/fd/{fd}").is_dir():
            self._undo.clear()
        else:
            self._synced.pop(identity(os.fstat(fd)), None)

    def status(self, fd: int) -> os.stat_result:
        self._step()
        return super().status(fd)

    def look(self, path: pathlib.Path) -> os.stat_result:
        self._step()
        return super().look(path)

    def rename(self, path: pathlib.Path, to: pathlib.Path) -> None:
        self._step()
        before = self._hide(to)
        super().rename(path, to)

        def undo() -> None:
            to.rename(path)
            if before is not None:
                before.rename(to)

        self._undo.append(undo)

    def link(self, path: pathlib.Path, to: pathlib.Path) -> None:
        self._step()
        super().link(path, to)
        self._undo.append(to.unlink)

    def unlink(self, path: pathlib.Path) -> None:
        self._step()
        before = self._hide(path)
        super().unlink(path)
        if before is not None:
            self._undo.append(lambda: before.rename(path))

    def touch(self, path: pathlib.Path) -> None:
        self._step()
        super().touch(path)

    def lock(self, fd: int) -> None:
        self._step()
        super().lock(fd)

    # --- inside -----------------------------------------------------------------------------------

    def _step(self, closing: int | None = None) -> None:
        self.calls += 1
        if self.calls == self._at:
            if self._error is None:
                raise Crash
            if closing is not None:
                self.close_quietly(closing)  # it is closed even if that fails
            raise OSError(self._error, os.strerror(self._error))

    def _remember(self, file: Identity, content: bytes) -> None:
        self._synced.setdefault(file, content)

    def _hide(self, path: pathlib.Path) -> pathlib.Path | None:
        """Keep a file that is about to lose its name."""
        if not path.exists():
            return None
        hidden = self._shadow / str(len(list(self._shadow.iterdir())))
        hidden.hardlink_to(path)
        return hidden


def _content(fd: int) -> bytes:
    return pathlib.Path(f"/proc/self/fd/{fd}").read_bytes()


def _spoil(path: pathlib.Path, synced: bytes, data: Data) -> None:
    now = path.read_bytes()
    new = now[len(synced) :] if now.startswith(synced) else b""
    if not new and data is Data.ALL:
        return
    left = {
        Data.NONE: b"", Data.HALF: new[: len(new) // 2], Data.ALL: new, Data.ZEROS: bytes(len(new)),
    }[data]  # fmt: skip
    path.write_bytes(synced + left)
