"""How much one peer may say, how long it may be, and what it may be called. Pure.

What comes too fast, or is too long, is not taken in; the peer is told, and an agent says it again.
The bounds are generous: all agents of a cluster come back at once after a restart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tmover import wire
from tmover.controller.allowance import Allowance
from tmover.controller.presence import speaker
from tmover.core.events import AnyEvent
from tmover.core.progress import Progress
from tmover.errors import ProtocolError, Refused

RATE, BURST = 200.0, 4000.0
"""Messages of one connection, by the second and at once: an agent with 16 workers says some 200."""
USER_RATE, USER_BURST = 20_000.0, 200_000.0
"""The same of all connections of one user: those of 8,192 agents say some 40,000 at once."""
TELL_EVERY_S = 1.0
"""A peer that says too much is told so not more often."""
KEPT_S = 60.0
"""A connection of which nothing was heard for so long begins anew."""
SMALL = 64 * 1024
LONGEST: Mapping[str, int] = {
    "SubmitRequest": 16 * 1024 * 1024,
    "Program": 4 * 1024 * 1024,
    "Looping": 8 * 1024 * 1024,
    "Warm": 8 * 1024 * 1024,
    "Heartbeat": 1024 * 1024,
    "Reported": 1024 * 1024,
    "Broken": 1024 * 1024,
    "Sharing": 4 * 1024 * 1024,
}
"""Bytes of a message, by kind; of any other kind `SMALL`."""
NAME, TEXT = 255, 1000
"""Characters of a name, and of a sentence: a longer one is cut off."""

_NAMES = frozenset({"job", "agent", "node", "worker", "lent_by"})
_NAME = re.compile(rf"[\w.~/-]{{1,{NAME}}}", re.ASCII)
_PLACE = re.compile(rf"[\w.~/:%\[\]-]{{0,{NAME}}}", re.ASCII)
"""An address, an endpoint, or a worker at the other end of a link."""


class _Kind(msgspec.Struct):
    type: str


_kind = msgspec.msgpack.Decoder(_Kind)


def check_length(body: bytes | memoryview) -> None:
    """Raise `ProtocolError` if a message is longer than its kind can be. Builds nothing of it."""
    if len(body) <= SMALL:
        return
    try:
        kind = _kind.decode(body).type
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        msg = f"unreadable message of {len(body)} bytes"
        raise ProtocolError(msg) from error
    longest = LONGEST.get(kind, SMALL)
    if len(body) > longest:
        msg = f"a {kind[:NAME]} of {len(body)} bytes: it can have {longest}"
        raise ProtocolError(msg)


class Rates:
    """Counts what each connection and each user says. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self._routes: dict[bytes, Allowance] = {}
        self._users: dict[str, Allowance] = {}
        self._told: dict[bytes, float] = {}
        self._cleared = 0.0

    def admits(self, route: bytes, user: str, now: float) -> bool:
        """Count a message; return whether it is one that may be taken in."""
        if now - self._cleared > KEPT_S:
            self._clear(now)
        own = self._routes.get(route)
        if own is None:
            own = self._routes[route] = Allowance(RATE, BURST, now)
        of_user = self._users.get(user)
        if of_user is None:
            of_user = self._users[user] = Allowance(USER_RATE, USER_BURST, now)
        return own.take(now) and of_user.take(now)

    def must_tell(self, route: bytes, now: float) -> bool:
        """Return whether a peer whose message was not taken in is to be told so now."""
        if now - self._told.get(route, -math.inf) < TELL_EVERY_S:
            return False
        self._told[route] = now
        return True

    def known(self) -> int:
        """Return of how many connections something is remembered."""
        return len(self._routes)

    def _clear(self, now: float) -> None:
        self._cleared = now
        self._routes = {r: b for r, b in self._routes.items() if now - b.at < KEPT_S}
        self._told = {r: at for r, at in self._told.items() if now - at < TELL_EVERY_S}


def too_much(message: wire.ToController, boot: str) -> wire.FromController:
    """Return what a peer is told that says too much; an agent then says all again."""
    if isinstance(message, wire.Request):
        text = "too many requests came over this connection: ask again later"
        return wire.RefusedReply(text=text)
    who = speaker(message)
    return wire.WhoAreYou(job=who.job, agent=who.agent, boot=boot)


def bounded(event: AnyEvent) -> AnyEvent:
    """Return an event whose names can be names, and whose sentences are short and of one line.

    Raises `Refused` if a name cannot be one: it may become part of a path, or of a command.
    """
    changes: dict[str, Any] = {}
    for field in event.__struct_fields__:
        value = getattr(event, field)
        if isinstance(value, str):
            kept = _bounded(field, value)
            if kept is not value:
                changes[field] = kept
        elif isinstance(value, tuple):
            for one in value:
                if isinstance(one, str):
                    _check_name(field, one, _PLACE)
        elif field == "schema":
            _check_schema(value)
    return msgspec.structs.replace(event, **changes) if changes else event


def sound(heartbeat: wire.Heartbeat) -> wire.Heartbeat:
    """Return a heartbeat whose numbers can be reckoned with; what cannot, is left out."""
    kept = tuple(one if one is not None and _is_sound(one) else None for one in heartbeat.progress)
    if kept == heartbeat.progress:
        return heartbeat
    return msgspec.structs.replace(heartbeat, progress=kept)


def plain(text: str) -> str:
    r"""Return a sentence of one line that is no longer than it may be.

    >>> plain("a\nb\x1b[2J"), len(plain("x" * 5000))
    ('a b [2J', 1000)
    """
    if len(text) <= TEXT and text.isprintable():
        return text
    cut = text[: TEXT - 1] + "…" if len(text) > TEXT else text
    return "".join(c if c.isprintable() else " " for c in cut)


def _bounded(field: str, value: str) -> str:
    if type(value) is not str:  # an enumeration's
        return value
    if field in _NAMES:
        if value or field != "lent_by":
            _check_name(field, value, _NAME)
        return value
    if field == "address":
        _check_name(field, value, _PLACE)
        return value
    return plain(value)


def _check_name(field: str, value: str, form: re.Pattern[str]) -> None:
    if form.fullmatch(value) is None or ".." in value.split("/"):
        msg = f"{field} {plain(value[:60])!r} cannot be a name"
        raise Refused(msg)


def _check_schema(schema: Mapping[str, str]) -> None:
    for name, digest in schema.items():
        if len(name) > TEXT or len(digest) > TEXT or not name.isprintable():
            msg = f"what is tracked cannot be called {plain(name[:60])!r}"
            raise Refused(msg)


def _is_sound(progress: Progress) -> bool:
    numbers = (progress.median_s, progress.own_s, *progress.waited.values())
    return all(0 <= number < math.inf for number in numbers) and len(progress.activity) <= NAME
