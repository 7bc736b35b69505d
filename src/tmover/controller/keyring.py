"""The keys that are let in, and whose they are: some fixed, others as they were introduced.

Introduced keys are kept in a file of JSON lines, so that a controller that is started again knows
them at once. What is lost of it costs an introduction and nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec

from tmover.controller.keys import write_private
from tmover.errors import ConfigError

logger = logging.getLogger(__name__)

PER_USER = 16_384
"""So many keys of one user are known; the one that was not used for longest is forgotten."""
STRANGER = "?"
"""No user is called so."""
_KEPT_S = 30 * 86400.0
"""A key that was introduced so long ago is introduced again after a restart."""
_SLACK = 1000
"""So many more lines than keys the file may have."""


class _Line(msgspec.Struct, frozen=True):
    key: str
    user: str
    at: float


_encode = msgspec.json.Encoder().encode
_lines = msgspec.json.Decoder(_Line)


class Keyring:
    """Whose key is whose. `path` is where introduced keys are kept, None if there are none."""

    def __init__(
        self,
        fixed: Mapping[bytes, str],
        path: pathlib.Path | None = None,
        *,
        serves: Callable[[str], bool] = lambda _: True,
        per_user: int = PER_USER,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Take over the introduced keys of users who are still served."""
        self._fixed = dict(fixed)
        self._path = path
        self._serves = serves
        self._per_user = per_user
        self._now = now
        self._owners: dict[bytes, str] = {}
        self._introduced: dict[str, collections.OrderedDict[bytes, float]] = {}
        self._count = 0
        for line in self._read():
            if serves(line.user) and now() - line.at < _KEPT_S:
                self._keep(line.key.encode(), line.user, line.at)

    def __contains__(self, key: object) -> bool:
        """Return whether the key is let in."""
        return key in self._fixed or key in self._owners

    def __getitem__(self, key: bytes) -> str:
        """Return whose key it is, "" for who runs the controller. Counts as use of it.

        One that was forgotten while its connection stands is a `STRANGER`'s.
        """
        user = self._fixed.get(key)
        if user is None:
            user = self._owners.get(key, STRANGER)
            if user is not STRANGER:
                self._introduced[user].move_to_end(key)
        return user

    def serves(self, user: str) -> bool:
        """Return whether a user's key may be introduced."""
        return self._serves(user)

    def introduce(self, key: bytes, user: str) -> None:
        """Let a key in from now on, as the user's."""
        if key in self._fixed:
            return
        at = self._now()
        self._keep(key, user, at)
        self._write(_Line(key.decode(), user, at))

    def __len__(self) -> int:
        """Return how many keys were introduced."""
        return len(self._owners)

    def _keep(self, key: bytes, user: str, at: float) -> None:
        before = self._owners.get(key)
        if before is not None:
            del self._introduced[before][key]
        self._owners[key] = user
        keys = self._introduced.setdefault(user, collections.OrderedDict())
        keys[key] = at
        if len(keys) > self._per_user:
            oldest, _ = keys.popitem(last=False)
            del self._owners[oldest]

    def _read(self) -> Iterator[_Line]:
        data = b""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                data = self._path.read_bytes()
        for line in data.splitlines():
            self._count += 1
            try:
                yield _lines.decode(line)
            except (msgspec.MsgspecError, ValueError):
                logger.warning("passed over line %s of %s: it is damaged", self._count, self._path)

    def _write(self, line: _Line) -> None:
        """Add a line; write the file anew when it has many that count no more."""
        if self._path is None:
            return
        self._count += 1
        try:
            if self._count > 2 * len(self._owners) + _SLACK:
                self._write_anew(self._path)
                return
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(self._path, flags, 0o600), "ab") as file:
                file.write(_encode(line) + b"\n")
        except (OSError, ConfigError) as error:
            logger.warning("a key that was introduced is not kept: %s", error)

    def _write_anew(self, path: pathlib.Path) -> None:
        kept = (
            _Line(key.decode(), user, at)
            for user, keys in self._introduced.items()
            for key, at in keys.items()
        )
        write_private(path, b"".join(_encode(line) + b"\n" for line in kept))
        self._count = len(self._owners)
