"""A file system over another: what is written lies in one directory, what was there stays as it is.

A path has its copy below `root`, by the same name. What has a copy is read there; what is changed
is copied first; what is removed is remembered as gone, with everything that was under it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable


class Overlay:
    """See the module. Paths are absolute; `spared` says which are not ours to redirect.

    It is a `detour.Way`. What is gone is known to this process and to those it forks later.
    """

    def __init__(self, root: str, *, spared: Callable[[str], bool]) -> None:
        self.root = os.path.realpath(root)
        self._spared = spared
        self._gone: set[str] = set()

    def copy_of(self, path: str) -> str:
        """Return where the copy of `path` lies, or would.

        >>> Overlay("/scratch", spared=bool).copy_of("/job/log")
        '/scratch/job/log'
        """
        return self.root + path

    def original_of(self, copy: str) -> str | None:
        """Return what `copy` is the copy of; None if it is none."""
        return copy[len(self.root) :] if copy.startswith(self.root + "/") else None

    def wipe(self) -> None:
        """Forget everything that was written."""
        self._gone.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    # --- a way, see `detour.Way` ------------------------------------------------------------------

    def look(self, path: str) -> str:
        """Return what to read instead of `path`: its copy if there is one, or if it is gone."""
        real = self._canonical(path)
        if self.spares(real):
            return path
        copy = self.copy_of(real)
        return copy if os.path.lexists(copy) or self._is_gone(real) else path

    def put(self, path: str, *, keep: bool, new: bool = False) -> str | None:
        """Return what to write instead of `path`, with its contents if they are to be kept."""
        real = self._canonical(path)
        if self.spares(real):
            return path
        self._require_directory(os.path.dirname(real), path)
        shown = self._exists(real)
        if new and shown:
            raise _error(errno.EEXIST, path)
        if shown and not keep and self._is_directory(real):
            raise _error(errno.EISDIR, path)
        copy = self.copy_of(real)
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        if keep:
            self._lift(real)
        return copy

    def drop(self, path: str) -> str | None:
        """Remove `path` here, and let it be gone."""
        real = self._canonical(path)
        if self.spares(real):
            return path
        if not self._exists(real):
            raise _error(errno.ENOENT, path)
        copy, is_directory = self.copy_of(real), self._is_directory(real)
        if is_directory and self._names(real):
            raise _error(errno.ENOTEMPTY, path)
        self._gone.add(real)
        if is_directory:
            shutil.rmtree(copy, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy)
        return None

    def pair(self, name: str, old: str, new: str) -> tuple[str, str] | None:
        """Rename or link here."""
        if name == "symlink":
            return self._link_softly(old, new)
        first, second = self._canonical(old), self._canonical(new)
        if self.spares(first) and self.spares(second):
            return old, new
        if not self._exists(first):
            raise _error(errno.ENOENT, old)
        if name == "link":
            self._lift(first)  # to write to either would change the original
            return self.look(old), self.put(new, keep=False, new=True) or new
        self._require_room(first, second, new)
        if first == second:
            return None
        source, target = first, second
        if not self.spares(first):
            source = self.copy_of(first)
            self._lift_all(first)
        if not self.spares(second):
            target = self.copy_of(second)
            self._require_directory(os.path.dirname(second), new)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.isdir(target) and not os.path.islink(target):
                shutil.rmtree(target)
        _move(source, target)
        self._gone |= {real for real in (first, second) if not self.spares(real)}
        return None

    def entries(self, path: str) -> list[os.DirEntry[str]] | None:
        """Return what is in a directory, here and there; None if nothing of it is here."""
        real = self._canonical(path)
        if os.path.islink(real) and not os.path.lexists(self.copy_of(real)):
            real = os.path.realpath(real)
        copy = self.copy_of(real)
        is_touched = os.path.isdir(copy) or any(
            os.path.dirname(each) == real for each in self._gone
        )
        if self.spares(real) or not is_touched:
            return None
        return list(self._found(real).values())

    def spares(self, path: str) -> bool:
        """Return whether a path is what it is: under the root, or not to be redirected."""
        return path == self.root or path.startswith(self.root + "/") or self._spared(path)

    # --- what is there ----------------------------------------------------------------------------

    def _canonical(self, path: str) -> str:
        """Return the one name by which a path is known; a link at its end is itself."""
        parent, name = os.path.split(path)
        return os.path.join(os.path.realpath(parent), name) if name else path

    def _is_gone(self, path: str) -> bool:
        while path not in self._gone:
            parent = os.path.dirname(path)
            if parent == path:
                return False
            path = parent
        return True

    def _exists(self, path: str) -> bool:
        copied = os.path.lexists(self.copy_of(path))
        return copied or (os.path.lexists(path) and not self._is_gone(path))

    def _seen(self, path: str) -> str:
        """Return where what is shown of a canonical path lies."""
        if self.spares(path):
            return path
        copy = self.copy_of(path)
        return copy if os.path.lexists(copy) or self._is_gone(path) else path

    def _is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(os.lstat(self._seen(path)).st_mode)
        except OSError:
            return False

    def _found(self, path: str) -> dict[str, os.DirEntry[str]]:
        """Return what a directory holds, by name."""
        found: dict[str, os.DirEntry[str]] = {}
        for place in (path, self.copy_of(path)):
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                os.scandir(place) as it,
            ):
                found.update(
                    (entry.name, entry)
                    for entry in it
                    if place != path or not self._is_gone(os.path.join(path, entry.name))
                )
        return found

    def _names(self, path: str) -> list[str]:
        return sorted(self._found(path))

    # --- what is asked for ------------------------------------------------------------------------

    def _require_directory(self, parent: str, path: str) -> None:
        if self.spares(parent):
            return
        if not os.path.isdir(self._seen(parent)):
            raise _error(errno.ENOTDIR if self._exists(parent) else errno.ENOENT, path)

    def _require_room(self, old: str, new: str, path: str) -> None:
        """Refuse to rename something to what the system would not let it replace."""
        if not self._exists(new):
            return
        is_directory = self._is_directory(new)
        if is_directory and not self._is_directory(old):
            raise _error(errno.EISDIR, path)
        if not is_directory and self._is_directory(old):
            raise _error(errno.ENOTDIR, path)
        if is_directory and self._names(new) and old != new:
            raise _error(errno.ENOTEMPTY, path)

    def _lift(self, path: str) -> None:
        """Have a copy of a canonical path as it is shown; of a directory without what is in it."""
        copy = self.copy_of(path)
        if self.spares(path) or os.path.lexists(copy) or not self._exists(path):
            return
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            os.mkdir(copy)
            shutil.copystat(path, copy)
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            shutil.copy2(path, copy, follow_symlinks=False)

    def _lift_all(self, path: str) -> None:
        """Have a copy of everything that is shown of a canonical path."""
        self._lift(path)
        if self._is_directory(path):
            for name in self._names(path):
                self._lift_all(os.path.join(path, name))

    def _link_softly(self, target: str, path: str) -> tuple[str, str]:
        """Make a link: to a copy if it names one by its whole path."""
        place = self.put(path, keep=False, new=True) or path
        is_absolute = target.startswith("/") and place != path
        return (self._seen(self._canonical(target)) if is_absolute else target), place


def _move(source: str, target: str) -> None:
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.move(source, target)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
