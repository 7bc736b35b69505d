"""The frame: everything that crosses a link has this header, and its epoch fences it.

A reader discards frames of a lower epoch as it meets them, so a link that survives a broken
collective needs no agreement on how much of it was sent.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

HEADER = struct.Struct("<BBHIIIQ")
SEGMENT = 1 << 20
"""The longest payload of a frame, so the most that is ever padded out."""


class Kind(enum.IntEnum):
    """What a frame is about."""

    DATA = 1
    VOTE = 2
    BARRIER = 3
    REVOKE = 4
    BYE = 5
    P2P = 6
    RECORD = 7
    STORE = 8


KINDS = frozenset(Kind)


class Op(enum.IntEnum):
    """Which collective a DATA frame belongs to."""

    NONE = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    BARRIER = 5
    GATHER = 6
    SCATTER = 7
    REDUCE = 8
    ALL_TO_ALL = 9


class Header(NamedTuple):
    """A frame's header. All frames of a message are alike but for `length`."""

    kind: int
    op: int
    detail: int
    """What must be equal besides: the element type and the reduction."""
    epoch: int
    seq: int
    """Number of the collective in its group and epoch; the tag of a P2P message."""
    length: int
    """Bytes of payload that follow."""
    total: int
    """Bytes of the whole message."""


class Stamp(NamedTuple):
    """What all frames of one message have in common."""

    kind: int
    op: int
    detail: int
    epoch: int
    seq: int
    total: int

    def head(self, length: int) -> bytes:
        """Return the header of a frame of this message.

        >>> len(Stamp(Kind.DATA, Op.BARRIER, 0, 1, 0, 0).head(0))
        24
        """
        return HEADER.pack(
            self.kind, self.op, self.detail, self.epoch, self.seq, length, self.total
        )

    def matches(self, head: Header) -> bool:
        """Return whether the header belongs to this message."""
        return head[:5] == self[:5] and head.total == self.total

    def __str__(self) -> str:
        return describe(self.kind, self.op, self.seq, self.total)


def parse(data: bytes | bytearray | memoryview) -> Header:
    """Return the header that `data` holds."""
    return Header._make(HEADER.unpack(data))


def describe(kind: int, op: int, seq: int, total: int) -> str:
    """Return what a message is, in words.

    >>> describe(Kind.DATA, Op.ALL_REDUCE, 7, 400)
    'all_reduce number 7 of 400 bytes'
    >>> describe(99, 0, 7, 400)
    'frame of kind 99'
    """
    if kind == Kind.DATA and op in Op._value2member_map_:
        return f"{Op(op).name.lower()} number {seq} of {total} bytes"
    if kind == Kind.P2P:
        return f"message with tag {seq} of {total} bytes"
    if kind in Kind._value2member_map_:
        return f"{Kind(kind).name.lower()} number {seq}"
    return f"frame of kind {kind}"
