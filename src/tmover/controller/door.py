"""The door: where whoever has a MUNGE credential has a key of theirs let in at the gate.

A socket of its own, so that the gate can go on refusing unknown keys. Anybody can connect here, so
all that can be said is small, a known form, and no more often than a fixed rate; nothing is kept of
who is refused but a bounded note not to hear that key again at once.
"""

from __future__ import annotations

import asyncio
import collections
import hmac
import logging
import pwd
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
import zmq.asyncio
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.asyncio import AsyncioAuthenticator

from tmover import wire
from tmover.controller.allowance import Allowance
from tmover.controller.audit import Audit
from tmover.controller.introduction import payload
from tmover.controller.keyring import STRANGER, Keyring
from tmover.controller.keys import Keypair
from tmover.controller.munge import Munge
from tmover.errors import ConfigError, MungeError, ProtocolError, Refused

K = TypeVar("K")
V = TypeVar("V")

logger = logging.getLogger(__name__)

_DOMAIN = "tmover-door"
_LONGEST = 8192
_QUEUED = 8
"""Messages from one peer, or to it."""
_HANDSHAKE_MS, _PING_MS, _DEAD_MS = 5000, 5000, 15000
_PER_S, _AT_ONCE = 1000.0, 2000.0
"""How many introductions are heard, from all together."""
_OF_A_USER_PER_S, _OF_A_USER_AT_ONCE = 100.0, 16_384.0
"""How many of one user's are accepted: as many as the gate knows keys of one, and then slowly."""
_REFUSED_FOR_S = 5.0
_NOTES = 4096
"""Of so many keys and users it is known what they did last."""


class Porter:
    """Decides about introductions: whose key it is, or why not. Knows no socket."""

    def __init__(
        self,
        *,
        server: bytes,
        munge: Munge,
        keyring: Keyring,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._munge = munge
        self._keyring = keyring
        self._now = now
        self._refused: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        self._users: collections.OrderedDict[int, Allowance] = collections.OrderedDict()

    async def hear(self, key: bytes, introduction: wire.Introduction) -> str:
        """Return whose `key`, which the peer proved to hold, is from now on. Raises `Refused`."""
        now = self._now()
        if now - self._refused.get(key, -_REFUSED_FOR_S) < _REFUSED_FOR_S:
            msg = f"this key was refused just now: try again in {_REFUSED_FOR_S:g} s"
            raise Refused(msg)
        try:
            return await self._let_in(key, introduction.credential, now)
        except Refused:
            _note(self._refused, key, now)
            raise

    async def _let_in(self, key: bytes, credential: str, now: float) -> str:
        try:
            uid, said = await asyncio.to_thread(self._munge.decode, credential)
        except MungeError as error:
            msg = f"MUNGE: {error}"
            raise Refused(msg) from error
        if not hmac.compare_digest(said, payload(self._server, key)):
            msg = "the credential was made for another key, controller or purpose"
            raise Refused(msg)
        user = _name(uid)
        if not self._keyring.serves(user):
            msg = f"its administrator has to put {user} among its `users`"
            raise Refused(msg)
        allowance = self._users.get(uid) or Allowance(_OF_A_USER_PER_S, _OF_A_USER_AT_ONCE, now)
        _note(self._users, uid, allowance)
        if not allowance.take(now):
            msg = f"{user} makes too many keys"
            raise Refused(msg)
        self._keyring.introduce(key, user)
        return user


class Door:
    """The bound socket. Must be made, used and closed inside the event loop."""

    def __init__(self, bind: str, *, server: Keypair, porter: Porter, audit: Audit) -> None:
        """Bind. Raises `ConfigError` if the address cannot be had."""
        self._porter = porter
        self._audit = audit
        self._allowance = Allowance(_PER_S, _AT_ONCE, time.monotonic())
        self._context = zmq.asyncio.Context()
        self._zap = AsyncioAuthenticator(self._context)
        self._zap.configure_curve(_DOMAIN, CURVE_ALLOW_ANY)
        self._zap.start()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = 1
        self._socket.curve_publickey, self._socket.curve_secretkey = server
        self._socket.zap_domain = _DOMAIN.encode()
        self._socket.maxmsgsize = _LONGEST
        self._socket.sndhwm = self._socket.rcvhwm = _QUEUED
        self._socket.linger = 0
        self._socket.handshake_ivl = _HANDSHAKE_MS
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = _PING_MS, _DEAD_MS
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            why = zmq.strerror(error.errno or 0).lower()
            msg = f"cannot listen on {bind}: {why}; choose another `door` in [controller]"
            raise ConfigError(msg) from error
        self.bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """What was bound, with the port that was found."""

    async def run(self) -> None:
        """Answer whoever comes, one after the other."""
        while True:
            route, *parts = await self._socket.recv_multipart(copy=False)
            key = str(parts[-1].get("User-Id")).encode() if parts else b""
            answer = await self._answer(key, [part.bytes for part in parts])
            if answer is not None:
                try:
                    self._socket.send_multipart([route.bytes, *wire.encode(answer)], zmq.DONTWAIT)
                except zmq.ZMQError:
                    logger.debug("whoever introduced a key has gone")
            await asyncio.sleep(self._allowance.wait_s(time.monotonic()))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._zap.stop()
        self._context.term()

    async def _answer(self, key: bytes, frames: list[bytes]) -> wire.FromDoor | None:
        """Return what to say; nothing to those who do not speak as one does here."""
        try:
            said = wire.decode_introduction(frames)
            user = await self._porter.hear(key, said)
        except ProtocolError as error:
            logger.debug("passed over a message at the door: %s", error)
            return None
        except Refused as refusal:
            if self._audit.refuse(STRANGER, "introduction", None, str(refusal)):
                logger.warning("refused an introduction: %s", refusal)
            return wire.RefusedReply(text=str(refusal))
        except Exception:  # one stranger's trouble is not the others'
            logger.exception("an introduction failed")
            return wire.RefusedReply(text="an internal error, see the controller's log")
        logger.debug("a key of %s was introduced", user)
        return wire.Introduced(user=user)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError) as error:
        msg = f"user {uid} has no name on the controller's machine"
        raise Refused(msg) from error


def _note(notes: collections.OrderedDict[K, V], key: K, value: V) -> None:
    """Take a note, and drop the oldest of too many."""
    notes[key] = value
    notes.move_to_end(key)
    if len(notes) > _NOTES:
        notes.popitem(last=False)
