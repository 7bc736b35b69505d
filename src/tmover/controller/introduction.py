"""How somebody whose key the controller does not know says who it is: with MUNGE, at the door.

`users/door.json` in the state directory of a cluster's controller tells everybody where that is and
which key it has; there is no secret in it. A client makes a key of its own, connects to the door
with it, and sends a credential in which MUNGE vouches for its user and in which both keys stand: it
is of no use to another client, nor with another controller. The controller alone can read it.
"""

from __future__ import annotations

import os
import pathlib
import stat
import time
from typing import NamedTuple

import msgspec
import zmq

from tmover import wire
from tmover.controller.keys import Keypair
from tmover.controller.munge import Munge
from tmover.errors import ConfigError, ProtocolError, Refused
from tmover.owner import PLACES

DOOR_FILE = "door.json"
_ANSWER_S = 5.0
"""After so long without an answer another credential is sent."""
_LONGEST_ANSWER = 8192


class Entrance(msgspec.Struct, frozen=True, kw_only=True):
    """What `users/door.json` says while a cluster's controller runs that knows users by MUNGE."""

    address: str
    door: str
    server: str
    """The public half of the controller's key."""
    boot: str
    pid: int
    host: str
    munge: str = ""
    """Munged's socket on all nodes, "" if it is where it usually is."""


class Found(NamedTuple):
    """An entrance, and the user who runs the controller behind it."""

    entrance: Entrance
    uid: int


def find(state: pathlib.Path) -> Found | None:
    """Return the entrance for the user whose place in a cluster's state directory `state` is.

    None if there is none. Raises `ConfigError` if anybody but root could have written it.
    """
    if state.parent.name != PLACES:
        return None
    path = state.parent / DOOR_FILE
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read()
    except OSError:  # none is there, or not for us
        return None
    if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022:
        msg = f"{path} is not root's alone: it is not to be trusted"
        raise ConfigError(msg)
    try:
        return Found(msgspec.json.decode(data, type=Entrance), found.st_uid)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        msg = f"{path} is damaged: {error}"
        raise ConfigError(msg) from error


def payload(server: bytes, client: bytes) -> bytes:
    """Return what a credential has in it: what it is for, and both public keys."""
    return b"tmover introduction 1\n" + server + b"\n" + client


class Introduction:
    """One client before the door. Waits for nothing: `step` is called now and then."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], found: Found, own: Keypair) -> None:
        self._found = found
        self._own = own
        self._sent_at: float | None = None
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.immediate = 1
        self.socket.maxmsgsize = _LONGEST_ANSWER
        self.socket.curve_serverkey = found.entrance.server.encode()
        self.socket.curve_publickey, self.socket.curve_secretkey = own
        self.socket.connect(found.entrance.door)

    @property
    def waits_for(self) -> int:
        """What the socket must be ready for before there is something to do."""
        return zmq.POLLOUT if self._sent_at is None else zmq.POLLIN

    def step(self) -> bool:
        """Do what can be done; return whether the key is known now.

        Raises `Refused` with the controller's reason, `MungeError` if there is no credential.
        """
        if self._sent_at is not None and time.monotonic() - self._sent_at > _ANSWER_S:
            self._sent_at = None
        if self._sent_at is None:
            self._send()
        return self._is_answered()

    def close(self) -> None:
        """Close the connection."""
        self.socket.close(linger=0)

    def _send(self) -> None:
        if not self.socket.poll(0, zmq.POLLOUT):
            return
        said = payload(self._found.entrance.server.encode(), self._own.public)
        made = Munge(self._found.entrance.munge).encode(said, reader=self._found.uid)
        self.socket.send_multipart(wire.encode(wire.Introduction(credential=made)), zmq.DONTWAIT)
        self._sent_at = time.monotonic()

    def _is_answered(self) -> bool:
        try:
            answer = wire.decode_at_door(self.socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return False
        except ProtocolError as error:
            raise Refused(str(error)) from error
        if isinstance(answer, wire.RefusedReply):
            raise Refused(answer.text)
        return True
