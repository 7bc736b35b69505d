"""How agents and commands speak to the controller: plain ZeroMQ sockets, in the caller's thread.

A `Channel` is one connection that follows the controller to a new address and says, from what its
monitor saw, why nobody answers. A `Client` asks one thing at a time over a channel. Nothing is
queued while there is no connection: what was sent into a broken one is lost, and the controller
asks for it again (`WhoAreYou`).
"""

from __future__ import annotations

import contextlib
import enum
import pathlib
import socket
import struct
import time
from types import TracebackType
from typing import Union

import msgspec
import zmq

from tmover import wire
from tmover.controller import introduction, keys
from tmover.controller.introduction import Introduction
from tmover.errors import (
    ConfigError,
    ControllerUnavailable,
    MungeError,
    ProtocolError,
    Refused,
)
from tmover.owner import is_anothers, user_name
from tmover.process import identify

ADDRESS_FILE = "controller.json"
MAX_MESSAGE = 64 * 1024 * 1024
"""Bytes; a plan of a hundred thousand ranks takes less."""
_PING_MS, _DEAD_MS = 4000, 5000
"""A ping costs the controller as much as a heartbeat."""
_RETRY_MS, _RETRY_MAX_MS = 50, 1000
_GONE_S = 2.0
"""For so long a controller whose process has ended may be started again."""

Answer = Union[wire.StatusReply, wire.Accepted]


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """What `DIR/controller.json` says while a controller runs."""

    address: str
    pid: int
    boot: str
    """Names one run of the controller."""
    host: str = ""
    """The machine whose `pid` it is; the file may lie where others see it, too."""


class Connection(enum.Enum):
    """How far a channel has come."""

    ABSENT = "nobody listens there"
    CONNECTED = "somebody listens there, but does not speak"
    REFUSED = "it does not accept our key"
    STRANGER = "it cannot read what is meant for our controller"
    OPEN = "it speaks with us"


_STATES = {
    zmq.EVENT_CONNECTED: Connection.CONNECTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Connection.OPEN,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Connection.ABSENT,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Connection.STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Connection.REFUSED,
    zmq.EVENT_DISCONNECTED: Connection.ABSENT,
    zmq.EVENT_CLOSED: Connection.ABSENT,
}
_WRONG_KEYS = frozenset({Connection.REFUSED, Connection.STRANGER})
_LOOK_S = 0.2
"""Keys that are refused are looked up again this often, and a munged that does not answer."""
_INTRODUCE_AGAIN_S = 10.0
"""Who was refused at the door comes back after so long."""
_CUT_OFF_TIMES = 3
"""So often in a row a handshake must be cut off before that says something about the keys."""


def read_address(state: pathlib.Path) -> Address:
    """Return where the controller of `state` is.

    Raises `ControllerUnavailable` if none was started, `ConfigError` if its word cannot be read.
    """
    if (found := introduction.find(state)) is not None:
        there = found.entrance
        return Address(address=there.address, pid=there.pid, boot=there.boot, host=there.host)
    path = state / ADDRESS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except FileNotFoundError as error:
        msg = f"no controller runs on {state}: {_how_to_start(state)}"
        raise ControllerUnavailable(msg) from error
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror}"
        raise ConfigError(msg) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        msg = f"{path} is damaged: {error}"
        raise ConfigError(msg) from error


def _how_to_start(state: pathlib.Path) -> str:
    """Return what to do about a controller that does not run."""
    if not is_anothers(state):
        return f"start one with `tmover controller --state {state}`"
    if state.exists():
        return f"its administrator has to start it, with {user_name()} among its `users`"
    return f"its administrator has to put {user_name()} among its `users`, and start it anew"


class Channel:
    """One connection to the controller of a state directory. Not for use by several threads."""

    def __init__(self, state: pathlib.Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Start to connect. Raises what `read_address` and `keys.read_client` raise."""
        self._state = state
        self._context = context
        self._address = read_address(state)
        self._keys, self._found = self._read_keys(None)
        self._introduction: Introduction | None = None
        self._refusal = ""
        """Why it was not let in at the door."""
        self._look_at = 0.0
        self.breaks = 0
        """How often a connection that spoke with us has ended."""
        self._begin()

    def _begin(self) -> None:
        """Make the sockets, and connect: to the door first if the key is one of our own."""
        self.connection = Connection.ABSENT
        self._cut_off = 0
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        """For a poller: readable when `receive` has something."""
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(sum(_STATES))
        self.socket.linger = 0
        self.socket.immediate = 1
        self.socket.maxmsgsize = MAX_MESSAGE
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = _PING_MS, _DEAD_MS
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = _RETRY_MS, _RETRY_MAX_MS
        self.socket.curve_serverkey = self._keys.server
        self.socket.curve_publickey, self.socket.curve_secretkey = self._keys.own
        if self._found is None:
            self._connect()
        else:
            self._introduction = Introduction(self._context, self._found, self._keys.own)

    @property
    def address(self) -> str:
        """Where it connects to."""
        return self._address.address

    def send(self, message: wire.ToController) -> bool:
        """Send, without waiting. Returns whether there was a connection to send it into."""
        try:
            self.socket.send_multipart(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> wire.FromController | None:
        """Return the next message, or None if there is none yet. Raises `ProtocolError`."""
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        return wire.decode_order(frames)

    def look(self) -> Connection:
        """Return how far the connection has come."""
        while self._monitor.poll(0):
            event, _ = struct.unpack("=Hi", self._monitor.recv_multipart()[0])
            self._note(event)
        now = time.monotonic()
        if now >= self._look_at and self._introduction is not None:
            self._go_on(self._introduction, now)
        if now >= self._look_at and self.connection in _WRONG_KEYS:
            self._look_at = now + _LOOK_S
            self._renew()
        return self.connection

    def follow(self) -> bool:
        """Go to where the controller is now. Returns whether that is another place."""
        try:
            address = read_address(self._state)
        except (ControllerUnavailable, ConfigError):
            return False
        is_elsewhere = address.address != self._address.address
        if self._introduction is not None:  # before a door, which may have moved, too
            self._renew()
        elif is_elsewhere:
            self.socket.disconnect(self._address.address)
            self._address = address
            self._connect()
        return is_elsewhere

    def explain(self) -> str:
        """Return one line on why nobody answers, for people."""
        state = self.look()
        if self._refusal:
            return f"the controller at {self.address} does not know us: {self._refusal}"
        if self._introduction is not None and self._found is not None:
            return f"the controller's door at {self._found.entrance.door} does not answer"
        if state is Connection.REFUSED:
            key = self._state / "keys" / "client.key"
            return f"the controller at {self.address} does not accept the key {key}"
        if state is Connection.STRANGER:
            key = self._state / "keys" / "server.pub"
            return f"the controller at {self.address} is not the one whose key is {key}"
        if state is Connection.OPEN:
            return f"the controller at {self.address} is there but does not answer"
        return f"no controller answers at {self.address}: {state.value}"

    def explain_end(self) -> str | None:
        """Return one line on a controller of this machine whose process has ended, else None."""
        try:
            known = read_address(self._state)
        except (ControllerUnavailable, ConfigError):
            return None
        if known.host != socket.gethostname() or identify(known.pid) is not None:
            return None
        ended = f"its process {known.pid} has ended"
        return f"no controller answers at {self.address}: {ended}; {_how_to_start(self._state)}"

    def wait(self, flags: int, timeout_s: float) -> bool:
        """Wait until the socket is ready for `flags`, the connection changes, or time is over."""
        poller = zmq.Poller()
        poller.register(self.socket, flags)
        poller.register(self._monitor, zmq.POLLIN)
        if self._introduction is not None and time.monotonic() >= self._look_at:
            poller.register(self._introduction.socket, self._introduction.waits_for)
        return self.socket in dict(poller.poll(max(0, int(timeout_s * 1000) + 1)))

    def close(self) -> None:
        """Close the sockets; the context is the caller's."""
        if self._introduction is not None:
            self._introduction.close()
            self._introduction = None
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)

    def _read_keys(
        self, before: keys.ClientKeys | None
    ) -> tuple[keys.ClientKeys, introduction.Found | None]:
        """Return what there is to speak to the controller with: files, or a key of our own."""
        found = introduction.find(self._state)
        if found is None:
            return keys.read_client(self._state), None
        own = keys.Keypair(*zmq.curve_keypair()) if before is None else before.own
        return keys.ClientKeys(server=found.entrance.server.encode(), own=own), found

    def _go_on(self, visit: Introduction, now: float) -> None:
        """Go on with an introduction; connect once the key is known."""
        try:
            if not visit.step():
                return
            self._refusal = ""
        except MungeError as error:
            self._refusal = str(error)
            self._look_at = now + _LOOK_S
            return
        except Refused as error:
            self._refusal = str(error)
            self.connection = Connection.REFUSED
            self._look_at = now + _INTRODUCE_AGAIN_S
        visit.close()
        self._introduction = None
        if not self._refusal:
            self.connection = Connection.ABSENT
            self._connect()

    def _renew(self) -> None:
        """Have our keys accepted that were not: new ones may lie there, or ours was forgotten."""
        try:
            known, found = self._read_keys(self._keys if self._found is not None else None)
        except ConfigError:
            return
        is_refused = found is not None and self.connection is Connection.REFUSED
        if (known, found) != (self._keys, self._found) or is_refused:
            self.close()
            self._keys, self._found = known, found
            with contextlib.suppress(ControllerUnavailable, ConfigError):
                self._address = read_address(self._state)
            self._begin()

    def _note(self, event: int) -> None:
        """Take in what the monitor saw. What a failed handshake said outlives its connection."""
        state = _STATES[zmq.Event(event)]
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._cut_off += 1
        elif state is not Connection.CONNECTED and event != zmq.EVENT_DISCONNECTED:
            self._cut_off = 0
        if self._cut_off >= _CUT_OFF_TIMES:
            state = Connection.STRANGER
        if self.connection is Connection.OPEN and state is Connection.ABSENT:
            self.breaks += 1
        was_told = self.connection in _WRONG_KEYS
        if not (was_told and state in {Connection.ABSENT, Connection.CONNECTED}):
            self.connection = state

    def _connect(self) -> None:
        try:
            self.socket.connect(self._address.address)
        except zmq.ZMQError as error:
            self.close()
            path = self._state / ADDRESS_FILE
            why = zmq.strerror(error.errno or 0).lower()
            msg = f"{path}: cannot connect to {self.address}: {why}"
            raise ConfigError(msg) from error


class Client:
    """Asks the controller, for commands. Use it as a context manager."""

    def __init__(self, state: pathlib.Path) -> None:
        """Read the address and the keys. Raises `ControllerUnavailable` or `ConfigError`."""
        self._state = state
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._channel = Channel(state, self._context)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def request(self, message: wire.AnyRequest, timeout_s: float = 10.0) -> Answer:
        """Ask, and return the answer.

        Raises `Refused` with the controller's reason, `ControllerUnavailable` if it does not answer
        in time or goes away, `ConfigError` if it does not accept our keys. After any of the last
        two, or another exception, it is not known whether the controller has heard the request.
        """
        deadline = time.monotonic() + timeout_s
        self._until(zmq.POLLOUT, deadline)
        self._channel.look()
        breaks = self._channel.breaks
        self._channel.send(message)
        while True:
            self._until(zmq.POLLIN, deadline, breaks)
            answer = self._channel.receive()
            if isinstance(answer, wire.RefusedReply):
                raise Refused(answer.text)
            if isinstance(answer, (wire.StatusReply, wire.Accepted)):
                return answer
            if answer is not None:
                msg = f"the controller answered with {type(answer).__name__}"
                raise ProtocolError(msg)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> Client:
        """Return the client."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection."""
        self.close()

    def _until(self, flags: int, deadline: float, breaks: int | None = None) -> None:
        """Wait for the socket; with `breaks`, no longer than the connection holds."""
        channel, began = self._channel, time.monotonic()
        while not channel.wait(flags, min(deadline - time.monotonic(), _GONE_S)):
            if channel.look() in _WRONG_KEYS:
                raise ConfigError(channel.explain())
            if breaks is not None and channel.breaks > breaks and not channel.wait(flags, 0.0):
                msg = f"the controller at {channel.address} went away before it answered"
                raise ControllerUnavailable(msg)
            if time.monotonic() >= deadline:
                raise ControllerUnavailable(channel.explain())
            is_long = time.monotonic() - began > _GONE_S
            if is_long and channel.look() is Connection.ABSENT and (gone := channel.explain_end()):
                raise ControllerUnavailable(gone)


def connect(state: pathlib.Path) -> Client:
    """Return a client of the controller that works on `state`."""
    return Client(state)


def ask(state: pathlib.Path, message: wire.AnyRequest, timeout_s: float = 10.0) -> Answer:
    """Ask the controller of `state` one thing, see `Client.request`."""
    with Client(state) as client:
        return client.request(message, timeout_s)
