"""The users that a controller of a whole cluster serves: whose key is whose, and who may do what.

Each has a directory `users/NAME` in the state directory, which stands for the state directory in
all that the user does. It is root's, so that nobody can put anything in the place of its files; the
files are the user's alone. Who can read a user's key may act on that user's jobs.
"""

from __future__ import annotations

import contextlib
import pathlib
import pwd
from collections.abc import Callable, Iterable

from tmover import wire
from tmover.controller import keys
from tmover.core.events import Record
from tmover.errors import ConfigError, Refused

DIRECTORY = "users"


class Users:
    """The users, by the public half of their keys."""

    def __init__(self, state: pathlib.Path, names: Iterable[str], server: keys.Keypair) -> None:
        """Make what is missing of their directories. Raises `ConfigError` for a stranger."""
        self._homes: dict[str, tuple[pathlib.Path, int]] = {}
        self.keys: dict[bytes, str] = {}
        for name in names:
            home, uid = state / DIRECTORY / name, _uid(name)
            own = home / "keys"
            for directory in (state, home.parent, home, own):
                _open_to_all(directory)
            pair = keys.read_or_make(own / "client.key", uid=uid)
            keys.write_private(own / "server.pub", server.public + b"\n", uid=uid)
            self.keys[pair.public] = name
            self._homes[name] = (home, uid)

    def announce(self, file: str, data: bytes) -> None:
        """Write a file into each user's directory."""
        for home, uid in self._homes.values():
            keys.write_private(home / file, data, uid=uid)

    def withdraw(self, file: str, data: bytes) -> None:
        """Remove a file from each user's directory, if it still holds what was announced."""
        for home, _ in self._homes.values():
            with contextlib.suppress(OSError):
                if (home / file).read_bytes() == data:
                    (home / file).unlink()


def check(user: str, message: wire.ToController, owner_of: Callable[[str], str | None]) -> None:
    """Raise `Refused` unless `user` may say this. "" is who runs the controller, who may all.

    `owner_of` a job that is not known is None. A user speaks for the agents of the user's own jobs,
    and asks about these.
    """
    if not user:
        return
    if isinstance(message, wire.SubmitRequest):
        if message.owner != user or message.slurm is None:
            msg = f"{user} may only submit jobs of Slurm, and for {user}"
            raise Refused(msg)
        return
    job = message.job if isinstance(message, (Record, wire.Request)) else None
    if job is not None and owner_of(job) not in (None, user):
        msg = f"job {job} is not {user}'s"
        raise Refused(msg)


def _open_to_all(directory: pathlib.Path) -> None:
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
