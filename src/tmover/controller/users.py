"""The users that a controller of a whole cluster serves by files: whose key is whose.

Each has a directory `users/NAME` in the state directory, which stands for the state directory in
all that the user does. It is root's, so that nobody can put anything in the place of its files; the
files are the user's alone. Who can read a user's key may act on that user's jobs. What users do to
their own files harms nobody else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import pwd
from collections.abc import Iterable

from tmover.controller import keys
from tmover.errors import ConfigError
from tmover.owner import PLACES

logger = logging.getLogger(__name__)

_MAX_KEY_BYTES = 1000


class Users:
    """The users, by the public half of their keys; none where MUNGE says who somebody is."""

    def __init__(self, state: pathlib.Path, names: Iterable[str], server: keys.Keypair) -> None:
        """Make what is missing of their directories. Raises `ConfigError` for a stranger.

        Only root serves others: a user's own controller that reads the cluster's file serves none.
        """
        self._state = state
        self._homes: dict[str, tuple[pathlib.Path, int]] = {}
        self.keys: dict[bytes, str] = {}
        if os.geteuid() != 0:
            return
        for name, uid in [(name, _uid(name)) for name in names]:
            home = state / PLACES / name
            own = home / "keys"
            for directory in (state, home.parent, home, own):
                open_to_all(directory)
            pair = _key(own / "client.key", uid)
            keys.write_private(own / "server.pub", server.public + b"\n", uid=uid)
            self.keys[pair.public] = name
            self._homes[name] = (home, uid)

    def announce(self, file: str, data: bytes) -> None:
        """Write a file into the directory of each user, and of nobody who was one before."""
        served = {home for home, _ in self._homes.values()}
        for home in set((self._state / PLACES).glob("*")) - served:
            _remove(home / file)
        for home, uid in self._homes.values():
            keys.write_private(home / file, data, uid=uid)

    def withdraw(self, file: str, data: bytes) -> None:
        """Remove a file from each user's directory, if it still holds what was announced."""
        for home, _ in self._homes.values():
            with contextlib.suppress(OSError):
                if (home / file).stat().st_size == len(data) and (home / file).read_bytes() == data:
                    (home / file).unlink()


def _key(path: pathlib.Path, uid: int) -> keys.Keypair:
    """Return the user's key pair; a new one if the user has spoilt the file or opened it to all."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > _MAX_KEY_BYTES:
            path.unlink()
    try:
        return keys.read_or_make(path, uid=uid)
    except ConfigError as error:
        logger.warning("%s; it is made anew", error)
        _remove(path)
        return keys.read_or_make(path, uid=uid)


def _remove(path: pathlib.Path) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


def open_to_all(directory: pathlib.Path) -> None:
    """Have a directory that others can pass through, and not list or change."""
    try:
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        directory.chmod(0o711)
    except OSError as error:
        msg = f"cannot use {directory}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(msg) from error


def _uid(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError as error:
        msg = f"there is no user {name!r} on this machine to serve"
        raise ConfigError(msg) from error
