"""Lines with a number and a sum over both it and what they hold: a change of any shows.

{"n": 3, "sum": "9f0c61aa", "entry": {...}}
"""

from __future__ import annotations

import zlib

import msgspec


class Sealed(msgspec.Struct, frozen=True):
    """A line as it was read."""

    n: int
    sum: str
    entry: msgspec.Raw

    @property
    def body(self) -> bytes:
        """What it holds, as JSON."""
        return bytes(self.entry)

    @property
    def is_whole(self) -> bool:
        """Whether the sum fits number and content."""
        return self.sum.encode() == _sum(self.n, self.body)


_decode = msgspec.json.Decoder(Sealed).decode


def seal(number: int, body: bytes) -> bytes:
    """Return the line, its end included."""
    return b'{"n":%d,"sum":"%s","entry":%s}\n' % (number, _sum(number, body), body)


def unseal(line: bytes) -> Sealed:
    """Return what the line says. Raises `ValueError` or `RecursionError` if it is none."""
    try:
        return _decode(line)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def _sum(number: int, body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(b"%d:%s" % (number, body))
