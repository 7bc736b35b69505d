"""Frames of a state transfer: a kind, where the payload belongs, and a hash over all of it.

Each frame's hash covers the context (job, epoch, step and what is tracked), the frame's own header
and its payload, so that nothing of another job, epoch, step, model or place can be taken for it.
The header has a check of its own: a damaged length is found before anybody waits for that many
bytes.
"""

from __future__ import annotations

import enum
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from tmover.errors import LinkError, StateError

CHUNK_BYTES = 4 << 20
"""The largest payload: a receiver holds one in a buffer until it is verified."""

_FIELDS = struct.Struct("<4sBxxxIQI")
_MAGIC = b"tmS1"
_CHECK = struct.Struct("<I")
_DIGEST_BYTES = 16
_HEAD_BYTES = _FIELDS.size + _CHECK.size + _DIGEST_BYTES
_CLOSED = "closed before the last frame"
_GATHER = 256
"""Pieces given to the kernel in one call; it takes at most IOV_MAX."""


class Kind(enum.IntEnum):
    """What a frame carries."""

    HELLO = 1
    ANSWER = 2
    HEADER = 3
    RECORD = 4
    TENSORS = 5
    CLOSING = 6


class Frame(NamedTuple):
    """The header of a frame."""

    kind: Kind
    serial: int
    """Counts the frames of one direction."""
    offset: int
    """Where the payload belongs in the stream of its kind."""
    size: int


class Pipe:
    """One end of a transfer: frames over a socket, until a deadline or the socket's timeout."""

    def __init__(self, sock: socket.socket, *, peer: str, timeout_s: float) -> None:
        self._sock = sock
        self._peer = peer
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._stall_s = sock.gettimeout() or timeout_s
        """How long one read or write may take: what the socket came with."""
        self._hash = xxhash.xxh3_128()
        self._sent = 0
        self._received = 0
        self._head = bytearray(_HEAD_BYTES)

    def bind(self, context: bytes) -> None:
        """Let the hashes of all further frames cover `context`."""
        self._hash = xxhash.xxh3_128(context)

    def send(self, kind: Kind, pieces: Sequence[memoryview | bytes], *, offset: int = 0) -> None:
        """Send one frame made of `pieces`, without joining them. Raises `LinkError`."""
        size = sum(map(len, pieces))
        fields = _FIELDS.pack(_MAGIC, kind, self._sent, offset, size)
        digest = self._hash.copy()
        digest.update(fields)
        for piece in pieces:
            digest.update(piece)
        head = fields + _CHECK.pack(xxhash.xxh32_intdigest(fields)) + digest.digest()
        self._sent += 1
        self._send_all([memoryview(head), *(memoryview(piece) for piece in pieces)])

    def receive(self, into: memoryview) -> Frame:
        """Receive one frame, its payload to `into`, and verify it.

        Raises `StateError` if it is damaged or does not follow the one before, `LinkError` if the
        link breaks.
        """
        self._receive_all(memoryview(self._head))
        fields = self._head[: _FIELDS.size]
        (check,) = _CHECK.unpack_from(self._head, _FIELDS.size)
        magic, kind, serial, offset, size = _FIELDS.unpack(fields)
        known = magic == _MAGIC and kind in Kind.__members__.values() and size <= len(into)
        if check != xxhash.xxh32_intdigest(fields) or not known or serial != self._received:
            msg = f"state from {self._peer} arrived damaged: frame {self._received} has no header"
            raise StateError(msg)
        self._receive_all(into[:size])
        digest = self._hash.copy()
        digest.update(fields)
        digest.update(into[:size])
        if digest.digest() != self._head[-_DIGEST_BYTES:]:
            msg = f"state from {self._peer} arrived damaged: frame {serial} has another hash"
            raise StateError(msg)
        self._received += 1
        return Frame(Kind(kind), serial, offset, size)

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._late()
        self._sock.settimeout(min(left, self._stall_s))

    def _late(self) -> LinkError:
        msg = f"the state transfer with {self._peer} took longer than {self._timeout_s:g} s"
        if time.monotonic() < self._deadline:
            msg = f"the state transfer with {self._peer} stood still for {self._stall_s:g} s"
        return LinkError(msg, (self._peer,))

    def _broken(self, reason: object) -> LinkError:
        msg = f"the state link to {self._peer} broke: {reason}"
        return LinkError(msg, (self._peer,))

    def _send_all(self, pieces: list[memoryview]) -> None:
        first = 0
        while first < len(pieces):
            self._wait()
            try:
                sent = self._sock.sendmsg(pieces[first : first + _GATHER])
            except TimeoutError as error:
                raise self._late() from error
            except OSError as error:
                raise self._broken(error) from error
            while first < len(pieces) and sent >= len(pieces[first]):
                sent -= len(pieces[first])
                first += 1
            if sent:
                pieces[first] = pieces[first][sent:]

    def _receive_all(self, into: memoryview) -> None:
        while into:
            self._wait()
            try:
                count = self._sock.recv_into(into)
            except TimeoutError as error:
                raise self._late() from error
            except OSError as error:
                raise self._broken(error) from error
            if count == 0:
                raise self._broken(_CLOSED)
            into = into[count:]
