"""The handshake that opens a link, without its socket: bytes in, bytes out.

    dialer                                  listener
    MAGIC, hello (with a nonce)      ->
                                     <-     nonce, proof of the secret
    proof of the secret              ->
                                     <-     a reason for refusing, empty if there is none

Both proofs cover everything said before, and neither side learns anything it can use elsewhere. The
listener says why it refuses; to whom does not hold the secret, only that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable

import msgspec

from tmover.errors import LinkError, ProtocolError

MAGIC = b"tmover/1"
_HELLO_LIMIT = 4096
_NONCE = 32
_PROOF = 32
_SHORT = struct.Struct("<H")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Who wants a link to whom, and what for."""

    job: str
    epoch: int
    group: str
    """Name of the process group; empty for the world's own links."""
    lane: str
    sender: str
    receiver: str
    nonce: bytes = b""


_decoder = msgspec.msgpack.Decoder(Hello)


def refusal(hello: Hello, job: str, uid: str, is_past: Callable[[int], bool]) -> str:
    """Return why `uid`, a rank of `job`, refuses a link; nothing if it is welcome."""
    if hello.job != job:
        return f"this is job {job}, not {hello.job}"
    if hello.receiver != uid:
        return f"this is {uid}, not {hello.receiver}"
    if is_past(hello.epoch):
        return f"epoch {hello.epoch} is over"
    return ""


def _prove(secret: bytes, who: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, who + hello + nonce, hashlib.sha256).digest()


class Dialer:
    """The side that opens the connection. `needs` is how many bytes it waits for."""

    def __init__(self, hello: Hello, secret: bytes) -> None:
        self._peer = hello.receiver
        self._secret = secret
        own = msgspec.structs.replace(hello, nonce=secrets.token_bytes(_NONCE))
        self._hello = msgspec.msgpack.encode(own)
        self._length: int | None = None
        self._answered = False
        self.needs = _NONCE + _PROOF
        self.done = False

    def start(self) -> bytes:
        """Return the first thing to send."""
        return MAGIC + _SHORT.pack(len(self._hello)) + self._hello

    def feed(self, data: bytes) -> bytes:
        """Take exactly `needs` bytes; return what to send next.

        Raises `LinkError` if the listener refuses, or does not hold the job's secret.
        """
        if not self._answered:
            return self._check(data)
        if self._length is None:
            (self._length,) = _SHORT.unpack(data)
            self.needs = self._length
            self.done = self._length == 0
            return b""
        reason = data.decode("utf-8", "replace")
        msg = f"{self._peer} refused the link: {reason}"
        raise LinkError(msg, (self._peer,))

    def _check(self, data: bytes) -> bytes:
        nonce, proof = data[:_NONCE], data[_NONCE:]
        if not hmac.compare_digest(proof, _prove(self._secret, b"listener", self._hello, nonce)):
            msg = f"what listens for {self._peer} does not hold this job's secret"
            raise LinkError(msg, (self._peer,))
        self._answered = True
        self.needs = _SHORT.size
        return _prove(self._secret, b"dialer", self._hello, nonce)


class Acceptor:
    """The side that was dialed. Complete when `hello` is set, over when `refused` says why."""

    def __init__(self, secret: bytes, check: Callable[[Hello], str]) -> None:
        self._secret = secret
        self._check = check
        self._buffer = b""
        self._said = b""
        self._claimed: Hello | None = None
        self._nonce = secrets.token_bytes(_NONCE)
        self.hello: Hello | None = None
        self.refused = ""

    @property
    def needs(self) -> int:
        """How many more bytes the next message has, as far as is known."""
        if self._claimed is not None:
            return _PROOF - len(self._buffer)
        start = len(MAGIC) + _SHORT.size
        if len(self._buffer) < start:
            return start - len(self._buffer)
        (length,) = _SHORT.unpack(self._buffer[len(MAGIC) : start])
        return start + int(length) - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Take what has come; return what to send. Raises `ProtocolError` at what is no hello."""
        self._buffer += data
        if self._claimed is None:
            return self._read_hello()
        if self.needs > 0:
            return b""
        return self._answer(self._claimed, self._buffer)

    def _read_hello(self) -> bytes:
        start = len(MAGIC) + _SHORT.size
        if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
            msg = "not a tmover handshake"
            raise ProtocolError(msg)
        if len(self._buffer) < start:
            return b""
        if len(self._buffer) + self.needs > start + _HELLO_LIMIT:
            msg = "hello too long"
            raise ProtocolError(msg)
        if self.needs > 0:
            return b""
        self._said, self._buffer = self._buffer[start:], b""
        try:
            self._claimed = _decoder.decode(self._said)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            msg = f"hello cannot be read: {error}"
            raise ProtocolError(msg) from error
        return self._nonce + _prove(self._secret, b"listener", self._said, self._nonce)

    def _answer(self, claimed: Hello, proof: bytes) -> bytes:
        expected = _prove(self._secret, b"dialer", self._said, self._nonce)
        if not hmac.compare_digest(proof, expected):
            self.refused = "wrong secret"
        else:
            self.refused = self._check(claimed)
        if self.refused:
            reason = self.refused.encode()
            return _SHORT.pack(len(reason)) + reason
        self.hello = claimed
        return _SHORT.pack(0)
