"""What was refused, to whom and why: a file of lines as the journal's, and how much of it is said.

`audit.jsonl` in the state directory is appended to; when it is long it becomes `audit.1.jsonl`, in
the place of the one before. Nobody can fill it, or the log, by being refused: of each user a few
refusals are written down at once and then one every few seconds, with how many were left out.
"""

from __future__ import annotations

import collections
import logging
import os
import pathlib
import pwd
import time
from collections.abc import Callable

import msgspec

from tmover.controller.allowance import Allowance
from tmover.controller.keyring import STRANGER
from tmover.controller.sealed import Sealed, seal, unseal

logger = logging.getLogger(__name__)

FILE, OLD_FILE = "audit.jsonl", "audit.1.jsonl"
_MAX_BYTES = 4 * 1024 * 1024
_AT_ONCE, _EVERY_S = 20, 5.0
_USERS = 1000
"""Of so many users it is known how often they were refused lately."""
_LONGEST = 200
"""Characters of what others have named or said."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file."""

    at: float
    """The controller's wall clock."""
    user: str
    """"" is who runs the controller, "?" a key that nobody knows."""
    uid: int | None
    what: str
    """The kind of message, or "connection" or "introduction"."""
    job: str
    reason: str
    more: int = 0
    """So many more of this user's were refused since the line before, and not written down."""


class _Budget:
    """How many refusals of one user may be written down, and how many were not."""

    def __init__(self, now: float) -> None:
        self.allowance = Allowance(1 / _EVERY_S, _AT_ONCE, now)
        self.omitted = 0


class Audit:
    """The file of one controller; with None for its directory, only what goes to the log."""

    def __init__(
        self,
        directory: pathlib.Path | None = None,
        *,
        max_bytes: int = _MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = None if directory is None else directory / FILE
        self._max_bytes = max_bytes
        self._clock = clock
        self._budgets: collections.OrderedDict[str, _Budget] = collections.OrderedDict()
        self._n: int | None = None

    def refuse(self, user: str, what: str, job: str | None, reason: str) -> bool:
        """Note a refusal; return whether it is written down, and so to be logged."""
        now = self._clock()
        budget = self._budgets.setdefault(user, _Budget(now))
        self._budgets.move_to_end(user)
        if len(self._budgets) > _USERS:
            self._budgets.popitem(last=False)
        if not budget.allowance.take(now):
            budget.omitted += 1
            return False
        more, budget.omitted = budget.omitted, 0
        if more:
            logger.warning("%s more of %s was refused meanwhile", more, user or "this user")
        refusal = Refusal(
            at=round(time.time(), 3), user=user, uid=_uid(user), what=what,
            job=_short(job or ""), reason=_short(reason), more=more,
        )  # fmt: skip
        if self._path is not None:
            self._write(self._path, refusal)
        return True

    def _write(self, path: pathlib.Path, refusal: Refusal) -> None:
        try:
            self._write_line(path, msgspec.json.encode(refusal))
        except OSError as error:
            logger.warning("a refusal is not written down: %s: %s", path, error.strerror)

    def _write_line(self, path: pathlib.Path, body: bytes) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if self._n is None:
                file.seek(0)
                self._n = _last(file.read(2 * self._max_bytes))
                if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                    file.write(b"\n")  # what a crash has torn stays a line of its own
            self._n += 1
            file.write(seal(self._n, body))
        if size >= self._max_bytes:
            path.replace(path.with_name(OLD_FILE))


def read(path: pathlib.Path) -> list[Refusal]:
    """Return what a file of refusals says, without the lines that are damaged."""
    found = []
    for line in path.read_bytes().splitlines():
        raw = _unsealed(line)
        if raw is not None and raw.is_whole:
            found.append(msgspec.json.decode(raw.body, type=Refusal))
    return found


def _unsealed(line: bytes) -> Sealed | None:
    try:
        return unseal(line)
    except (ValueError, RecursionError):
        return None


def _last(data: bytes) -> int:
    numbers = (raw.n for raw in map(_unsealed, reversed(data.splitlines())) if raw is not None)
    return next(numbers, 0)


def _short(text: str) -> str:
    """Return what others have named or said, as it may stand in a file."""
    return text.encode("utf-8", "replace").decode()[:_LONGEST]


def _uid(user: str) -> int | None:
    if not user:
        return os.geteuid()
    if user == STRANGER:
        return None
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        return None
