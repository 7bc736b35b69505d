"""The controller's socket: who may speak, and what arrives.

A ROUTER with CURVE. Only a peer that holds the client key gets through the handshake; what it sends
is read or refused with a line, and never harms. The route of a message is the connection it came
over, so a peer that connects anew has another one.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import re
import socket
from collections.abc import Container, Mapping
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from tmover import wire
from tmover.controller import limits
from tmover.controller.audit import Audit
from tmover.controller.keyring import STRANGER, Keyring
from tmover.controller.keys import Keypair
from tmover.errors import ConfigError, ProtocolError

logger = logging.getLogger(__name__)

_ZAP_DOMAIN = b"tmover"
_MAX_INCOMING = 16 * 1024 * 1024
_MAX_UNREAD, _MAX_UNSENT = 100, 1000
"""Messages from one peer, and to it. What does not fit waits at the peer's, or is sent again when
the agent has asked; one that does not read loses its lease."""
_HANDSHAKE_MS = 30_000
"""A connection that has not proven by then whose it is, is closed. Thousands that come back at once
after a restart take turns."""
_AT_ONCE = 256
"""Messages that are taken in before those that are there are acted on."""
_BACKLOG = 4096
"""Connections that wait to be let in, after a restart nearly all at once; the kernel may cut it to
its `net.core.somaxconn`. Those for whom there is no room try again after seconds."""
_LINGER_MS = 500
_PING_MS, _DEAD_MS = 10_000, 10_000
"""Only to get rid of connections whose other end is gone without a word: leases do the rest."""
_ADDRESS = re.compile(r"tcp://(?:[^\s:/\[\]\ud800-\udfff]+|\[[0-9A-Fa-f:.%\w]+\]):([0-9]{1,5})")
_MAX_PORT = 65535
_SUCH_AS = "such as tcp://127.0.0.1:5599"


class Heard(NamedTuple):
    """A message, the route back to who sent it, and whose key it was sent with."""

    route: bytes
    message: wire.ToController
    user: str


class Gate:
    """The bound socket. Must be made, used and closed inside the event loop."""

    def __init__(
        self,
        bind: str,
        *,
        server: Keypair,
        client: Keypair,
        users: Mapping[bytes, str] | None = None,
        keyring: Keyring | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Bind. `users` are let in beside `client`, by their public keys; or those of a `keyring`.

        Raises `ConfigError` if the address cannot be had.
        """
        _check(bind)
        if keyring is None:
            keyring = Keyring({client.public: "", **(users or {})})
        self._users = keyring
        self.audit = audit or Audit()
        """Where it is noted who was refused."""
        self._context = zmq.asyncio.Context()
        self._zap = AsyncioAuthenticator(self._context)
        self._zap.configure_curve_callback(_ZAP_DOMAIN.decode(), _OnlyKeys(self._users, self.audit))
        self._zap.start()
        self._socket = _socket(self._context, server)
        self.bound = ""
        """What was bound, with the port that was found."""
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            msg = f"cannot listen on {bind}: {zmq.strerror(error.errno or 0).lower()}"
            if error.errno == zmq.EADDRINUSE:
                msg += "; choose another with --bind, or port 0 for a free one"
            else:
                msg += f"; choose an address of this machine with --bind, {_SUCH_AS}"
            raise ConfigError(msg) from error
        self._inbox: collections.deque[Heard] = collections.deque()
        self.is_behind = False
        """Whether more may have come than was read: silence is no news then."""
        self._stirred = asyncio.Event()
        """Set whenever there may be something to read: the descriptor tells of changes only."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor(), self._stirred.set)
        self.bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def address(self) -> str:
        """Where others connect to: `bound`, with this machine's name for a wildcard."""
        return reachable(self.bound)

    async def receive(self) -> Heard:
        """Return the next message that can be read, the route back to who sent it, and its user.

        The user is "" if it is sent with the controller's own client key.
        """
        while not self._inbox:
            await asyncio.sleep(0)  # what the last ones have led to comes before the next ones
            self._stirred.clear()
            self._read()
            if not self._inbox:
                await self._stirred.wait()
        return self._inbox.popleft()

    def send(self, route: bytes, message: wire.FromController) -> bool:
        """Send at once. Returns False if nobody is at the other end of `route` any more."""
        self._stirred.set()  # sending takes note of what has come, and the descriptor says no more
        try:
            self._socket.send_multipart([route, *wire.encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            logger.debug("could not send %s: %s", type(message).__name__, error)
            return False
        return True

    def _read(self) -> None:
        """Take in what has come, up to some messages."""
        self.is_behind = False
        for _ in range(_AT_ONCE):
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            heard = self._heard(parts)
            if heard is not None:
                self._inbox.append(heard)
        self.is_behind = True
        self._stirred.set()

    def _heard(self, parts: list[zmq.Frame]) -> Heard | None:
        """Return the message, or None after it was refused."""
        route, *frames = (part.bytes for part in parts)
        key = str(parts[-1].get("User-Id")).encode()
        try:
            limits.check_length(frames[-1] if frames else b"")
            return Heard(route, wire.decode_event(frames), self._users[key])
        except ProtocolError as error:
            if self.audit.refuse(self._users[key], "message", None, str(error)):
                logger.warning("refused a message: %s", error)
            self.send(route, wire.RefusedReply(text=str(error)))
            return None

    def _descriptor(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Close the socket, sending what is queued if that does not take long."""
        if self.bound:
            self._loop.remove_reader(self._descriptor())
        self._socket.close()
        self._zap.stop()
        self._context.term()


def _socket(context: zmq.asyncio.Context, server: Keypair) -> zmq.Socket[bytes]:
    """Return a socket that lets in whose key ZAP knows, and takes so much of each and no more."""
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    made = plain.socket(zmq.ROUTER)
    made.router_mandatory = 1
    made.curve_server = 1
    made.curve_publickey, made.curve_secretkey = server
    made.zap_domain = _ZAP_DOMAIN
    made.maxmsgsize = _MAX_INCOMING
    made.rcvhwm, made.sndhwm = _MAX_UNREAD, _MAX_UNSENT
    made.handshake_ivl = _HANDSHAKE_MS
    made.linger = _LINGER_MS
    made.backlog = _BACKLOG
    made.heartbeat_ivl, made.heartbeat_timeout = _PING_MS, _DEAD_MS
    return made


def _check(bind: str) -> None:
    """Raise `ConfigError` unless it is an address: ZeroMQ takes what is left of a port's number."""
    found = _ADDRESS.fullmatch(bind)
    if found is None or int(found[1]) > _MAX_PORT:
        msg = (
            f"cannot listen on {bind!r}: write tcp://ADDRESS:PORT, {_SUCH_AS}; port 0 is a free one"
        )
        raise ConfigError(msg)


def reachable(bound: str) -> str:
    """Return an address that others can connect to: with this machine's name for a wildcard."""
    return bound.replace("//0.0.0.0:", f"//{socket.gethostname()}:").replace(
        "//[::]:", f"//{socket.gethostname()}:"
    )


class _OnlyKeys:
    """Lets in who holds one of some keys."""

    def __init__(self, public: Container[bytes], audit: Audit) -> None:
        self._public = public
        self._audit = audit

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether `key`, which the peer proved to hold, is one of them."""
        if key in self._public:
            return True
        reason = f"the key {key.decode(errors='replace')} is not ours"
        if self._audit.refuse(STRANGER, "connection", None, reason):
            logger.warning("refused a connection: %s", reason)
        return False
