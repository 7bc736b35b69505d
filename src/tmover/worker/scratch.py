"""Where a rehearsal's files go: to a directory of their own if one is set, else where it says.

Without a directory what is written is noticed, and said once.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping

from tmover.worker.detour import Detour
from tmover.worker.overlay import Overlay

logger = logging.getLogger(__name__)

_SYSTEM = ("/dev", "/proc", "/sys", "/run")
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""What they name is meant to be shared, and a rehearsal to fill it."""
_SAID = 5
"""So many files that a rehearsal writes are named."""


class Spared:
    """Says which files a rehearsal may write as ever.

    Those of the system, of tmover (`ours`), temporary ones and caches; but not what is under the
    directory that the job was started in, if that is a temporary one itself.
    """

    def __init__(self, ours: tuple[str, ...], environ: Mapping[str, str]) -> None:
        home = os.path.expanduser("~")
        caches = [environ[name] for name in _CACHES if environ.get(name)]
        self._always = (*_SYSTEM, *map(os.path.realpath, ours))
        self._usually = tuple(
            map(
                os.path.realpath,
                (tempfile.gettempdir(), f"{home}/.cache", f"{home}/.triton", *caches),
            )
        )
        start = os.getcwd()
        is_inside = any(start != place and _is_under(start, place) for place in self._usually)
        self._start = start if is_inside else None

    def __call__(self, path: str) -> bool:
        """Return whether `path`, which is absolute, is such a file."""
        if any(_is_under(path, place) for place in self._always):
            return True
        if self._start is not None and _is_under(path, self._start):
            return False
        return any(_is_under(path, place) for place in self._usually)

    def is_ours(self, path: str) -> bool:
        """Return whether `path` is the system's or tmover's."""
        return any(_is_under(path, place) for place in self._always)


def _is_under(path: str, place: str) -> bool:
    return path == place or path.startswith(place.rstrip("/") + "/")


class Noticing:
    """A way that leads nowhere else, and says which files were written. See `detour.Way`."""

    def __init__(self, spared: Spared) -> None:
        self._spared = spared
        self.written: dict[str, None] = {}

    def look(self, path: str) -> str:
        """Let it be read."""
        return path

    def put(self, path: str, *, keep: bool, new: bool = False) -> str | None:
        """Let it be written, and say so; a directory that is there already is not."""
        if not (new and os.path.isdir(path)):
            self._notice(path)
        return path

    def drop(self, path: str) -> str | None:
        """Let it be removed, and say so."""
        self._notice(path)
        return path

    def pair(self, name: str, old: str, new: str) -> tuple[str, str] | None:
        """Let it be done, and say so."""
        self._notice(new)
        return old, new

    def entries(self, path: str) -> list[os.DirEntry[str]] | None:
        """Let it be seen."""
        return None

    def _notice(self, path: str) -> None:
        if path in self.written or self._spared(path) or len(self.written) > _SAID:
            return
        self.written[path] = None
        what = path if len(self.written) <= _SAID else "more files"
        logger.warning(
            "the rehearsal writes %s, which the job writes too: guard it by `step.committed`, or "
            "set [worker] scratch",
            what,
        )


class Scratch:
    """The directory that one process's rehearsal writes to instead of anywhere else."""

    def __init__(self, root: str, spared: Spared) -> None:
        os.makedirs(os.path.dirname(root), exist_ok=True)
        self.overlay = Overlay(root, spared=spared)
        self.overlay.wipe()  # a process of this name may have been killed here
        self._before_loop: list[str] = []

    def looping(self) -> None:
        """Take note of what the script has made before its loop."""
        self._before_loop = list(self._directories())

    def leave(self, detour: Detour, *, keep: bool) -> None:
        """Let the process, which is no rehearsal any more, write where it says.

        Directories that the script has made before its loop are made where they are missing. What
        it has open to append to goes on at the end of what is there. Other files that are open stay
        here, and so does everything if it is to be kept; else it is removed.
        """
        detour.remove()
        self._move_home()
        for path in self._before_loop:
            with contextlib.suppress(OSError):
                os.makedirs(path, exist_ok=True)
        stays = [copy for copy in list(_reopened(self.overlay)) if os.path.lexists(copy)]
        for copy in stays:
            logger.warning(
                "%s is open since the rehearsal: what is written to it goes to %s; open it in the "
                "loop, or to append (mode 'a')",
                self.overlay.original_of(copy),
                copy,
            )
        if not keep and not stays:
            remover = threading.Thread(target=self.overlay.wipe, name="tmover-scratch", daemon=True)
            remover.start()

    def _move_home(self) -> None:
        """Leave a directory that was made here for the one that it stands for."""
        original = self.overlay.original_of(os.getcwd())
        if original is not None:
            os.chdir("/")
            with contextlib.suppress(OSError):
                os.makedirs(original, exist_ok=True)
            with contextlib.suppress(OSError):
                os.chdir(original)

    def _directories(self) -> Iterator[str]:
        for place, _, _ in os.walk(self.overlay.root):
            original = self.overlay.original_of(place)
            if original is not None:
                yield original


def _reopened(overlay: Overlay) -> Iterator[str]:
    """Let files open to append go on at the real ones; yield the copies that others have open."""
    found: dict[int, tuple[str, str]] = {}
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = os.readlink(f"/proc/self/fd/{each}").removesuffix(" (deleted)")
            original, mode = overlay.original_of(copy), fcntl.fcntl(int(each), fcntl.F_GETFL)
            if original is None or mode & os.O_ACCMODE == os.O_RDONLY:
                continue
            if mode & os.O_APPEND:
                found[int(each)] = original, copy
            else:
                yield copy
    _flush(set(found))
    for number, (original, copy) in found.items():
        if not _continue(number, original):
            yield copy


def _continue(number: int, path: str) -> bool:
    """Let an open file be the end of `path`; return whether it is."""
    try:
        _append_to(number, path)
    except OSError as error:
        logger.warning("%s cannot be appended to: %s", path, error)
        return False
    return True


def _append_to(number: int, path: str) -> None:
    access = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
    os.makedirs(os.path.dirname(path), exist_ok=True)
    real = os.open(path, access | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.lseek(real, 0, os.SEEK_END)
        os.dup2(real, number, inheritable=os.get_inheritable(number))
    finally:
        os.close(real)


def _flush(numbers: set[int]) -> None:
    """Write out what Python still holds of these files: it was rehearsed."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for each in gc.get_objects() if numbers else ():
        if issubclass(type(each), kinds):
            with contextlib.suppress(OSError, ValueError):
                if each.fileno() in numbers:
                    each.flush()


def place(directory: str, job: str, worker: str) -> str:
    """Return where one process's files go; `~` and variables such as `$TMPDIR` are filled in.

    >>> place("/scratch", "slurm7", "n1-4/0")
    '/scratch/slurm7/n1-4-0'
    """
    filled = os.path.abspath(os.path.expanduser(os.path.expandvars(directory)))
    return os.path.join(filled, job, worker.replace("/", "-"))
