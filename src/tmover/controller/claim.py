"""Whose the journals are: a lock where locks hold, and a claim that is renewed everywhere.

`lock` is locked with flock, which the kernel lets go when its holder dies. Between machines it may
not hold: some network file systems keep locks to each machine, others have none. So `claim` names
the holder, who touches it again and again. How old it is, is told by the clock of the machine that
keeps the files alone. Somebody else's claim that was touched lately is refused. One that was not is
taken over, and whoever held it finds out before anything more is acted on: a line counts only if
the claim is ours after it was on disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tmover.controller.disk import Disk, read_all, sync_directory, write_new
from tmover.errors import ConfigError, JournalError, Superseded

logger = logging.getLogger(__name__)

CLAIM = "claim"
LAST = "claim.last"
"""The claim of a controller that has ended as it should."""
_LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_MOST = 64 * 1024
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the journals."""

    host: str
    pid: int
    boot: str
    """The boot of that machine's kernel."""
    run: str
    """Names one run of a controller."""
    lock: int = 0
    """The number of the file that is locked, 0 if locks are not kept there."""
    claim_s: float = 10.0
    """For how long the claim holds if it is not renewed."""

    def __str__(self) -> str:
        """Return who it is in a few words."""
        return f"process {self.pid} on {self.host}"


class Found(NamedTuple):
    """A claim that is there."""

    holder: Holder
    touched: float
    """When, by the clock of the file system."""


class Claim:
    """Ours on a directory of journals."""

    def __init__(self, directory: pathlib.Path, disk: Disk, claim_s: float) -> None:
        """Take it. Raises `ConfigError` if another controller has it."""
        self._directory = directory
        self._disk = disk
        self._path = directory / CLAIM
        self._every_s = claim_s / 5
        self._confirmed = -claim_s
        self._alone = threading.Lock()
        """Held by the one thread that looks at the claim: it is renewed in another."""
        self._is_released = False
        self.is_taken_over = False
        """Whether the one before may still live, on another machine."""
        with _usable(directory / _LOCK):
            self._lock = disk.open(directory / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            lock = self._take_lock()
            self.holder = Holder(
                host=socket.gethostname(), pid=os.getpid(), boot=_boot(),
                run=secrets.token_hex(8), lock=lock, claim_s=claim_s,
            )  # fmt: skip
            with _usable(self._path):
                self._take()
        except BaseException:
            with contextlib.suppress(OSError):
                disk.close(self._lock)
            raise

    def confirm(self) -> None:
        """Make sure that the journals are still ours.

        Raises `Superseded` if they are not, `JournalError` if that cannot be told.
        """
        with self._alone:
            self._confirm()

    def _confirm(self) -> None:
        now = _now()
        if self._is_released:
            msg = f"{self._path} was given back"
            raise JournalError(msg)
        try:
            found = find(self._directory, self._disk)
            if found is None:  # somebody has removed it
                self._put()
                found = find(self._directory, self._disk)
        except (OSError, ConfigError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            msg = f"cannot tell whether {self._path} is still ours: {why}"
            raise JournalError(msg) from error
        if found is None or found.holder.run != self.holder.run:
            by = "somebody" if found is None else str(found.holder)
            msg = (
                f"another controller ({by}) has taken {self._directory} over, since this one was "
                f"not heard of for {self.holder.claim_s:g} s: it ends here, nothing more is decided"
            )
            raise Superseded(msg)
        self._confirmed = now

    def confirm_if_due(self) -> None:
        """Confirm unless that was done a moment ago."""
        if _now() - self._confirmed > self._every_s:
            self.confirm()

    def renew(self) -> None:
        """Confirm it, and have others see that we live. Raises what `confirm` does."""
        with self._alone:
            self._confirm()
            try:
                self._disk.touch(self._path)
            except OSError as error:
                msg = f"cannot renew {self._path}: {error.strerror}"
                raise JournalError(msg) from error

    def release(self) -> None:
        """Let another controller have the journals at once."""
        with self._alone, contextlib.suppress(OSError, JournalError, Superseded):
            self._confirm()
            self._disk.touch(self._path)
            self._disk.rename(self._path, self._directory / LAST)
        self._is_released = True
        with contextlib.suppress(OSError):
            self._disk.close(self._lock)

    # --- taking it --------------------------------------------------------------------------------

    def _take_lock(self) -> int:
        """Lock the file; return its number, 0 if this file system keeps no locks."""
        try:
            self._disk.lock(self._lock)
        except BlockingIOError as error:
            with _usable(self._path):
                found = find(self._directory, self._disk)
            holder = "unknown" if found is None else str(found.holder)
            raise _refusal(self._directory, holder) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                msg = f"cannot lock {self._directory / _LOCK}: {error.strerror}"
                raise ConfigError(msg) from error
            logger.warning(
                "%s cannot be locked (%s): only its claim keeps other controllers off",
                self._directory, error.strerror,
            )  # fmt: skip
            return 0
        with _usable(self._directory / _LOCK):
            return self._disk.status(self._lock).st_ino

    def _take(self) -> None:
        """Put our claim in the place of none, or of one that is over."""
        while (found := find(self._directory, self._disk)) is None:
            if self._put():
                self.confirm()
                return
        is_dead = found.holder.boot == self.holder.boot and found.holder.lock == self.holder.lock
        if is_dead and self.holder.lock:  # its kernel is ours: it would hold the lock
            self._put(over=True)
        else:
            self._take_over(found)
        try:
            self.confirm()
        except Superseded as error:
            raise ConfigError(str(error)) from error

    def _take_over(self, found: Found) -> None:
        """Take the claim of a controller that may be frozen, or cut off; refuse if it is not."""
        before = found.holder
        claim_s = max(before.claim_s, self.holder.claim_s)
        age = self._clock() - found.touched
        if age < claim_s:
            heard = f", heard of {max(0.0, age):.1f} s ago"
            dead = f"; if it is dead, start again {claim_s:g} s after it was heard of"
            raise _refusal(self._directory, str(before), heard, dead)
        logger.warning(
            "%s was not heard of for %.1f s: its claim on %s is taken over",
            before, age, self._directory,
        )  # fmt: skip
        self._put(over=True)
        self.is_taken_over = True
        time.sleep(before.claim_s / 5)  # so long it may act without having looked

    def _put(self, *, over: bool = False) -> bool:
        """Write our claim; without `over` only if there is none. Returns whether it was."""
        beside = self._directory / f"{CLAIM}.{self.holder.run}"
        try:
            write_new(self._disk, beside, msgspec.json.encode(self.holder) + b"\n")
            if over:
                self._disk.rename(beside, self._path)
            else:
                self._link(beside)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self._disk.unlink(beside)
        sync_directory(self._disk, self._directory)
        return True

    def _link(self, beside: pathlib.Path) -> None:
        """Give our claim its name, if that is free."""
        try:
            self._disk.link(beside, self._path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            self._disk.rename(beside, self._path)  # no hard links here: who is last has it

    def _clock(self) -> float:
        """Return the time by the clock of the file system."""
        beside = self._directory / f"{CLAIM}.{self.holder.run}"
        write_new(self._disk, beside, b"")
        try:
            return self._disk.look(beside).st_mtime
        finally:
            self._disk.unlink(beside)


def find(directory: pathlib.Path, disk: Disk) -> Found | None:
    """Return the claim on the journals, None if there is none. Raises `ConfigError`, `OSError`."""
    path = directory / CLAIM
    try:
        fd = disk.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        data = read_all(disk, fd, _MOST)
        touched = disk.status(fd).st_mtime
    finally:
        disk.close(fd)
    try:
        return Found(msgspec.json.decode(data, type=Holder), touched)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        msg = f"{path} is damaged: {error}. If no controller works here, remove it"
        raise ConfigError(msg) from error


def last_heard(directory: pathlib.Path) -> float | None:
    """Return when a controller was last known to work on the journals, None if that is unknown."""
    times = []
    for name in (CLAIM, LAST):
        with contextlib.suppress(OSError):
            times.append((directory / name).stat().st_mtime)
    return max(times, default=None)


@contextlib.contextmanager
def _usable(path: pathlib.Path) -> Iterator[None]:
    """Raise `ConfigError` if the file cannot be used."""
    try:
        yield
    except OSError as error:
        msg = f"cannot use {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(msg) from error


def _refusal(directory: pathlib.Path, holder: str, heard: str = "", dead: str = "") -> ConfigError:
    return ConfigError(
        f"another controller ({holder}{heard}) works on {directory}: "
        f"stop it, or choose another state directory{dead}"
    )


def _boot() -> str:
    """Return which boot of which kernel this is, what nobody else says where it does not tell."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return secrets.token_hex(8)


def _now() -> float:
    """Return a clock that goes on while this machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
