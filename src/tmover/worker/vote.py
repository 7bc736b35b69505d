"""The vote on an attempt: one exchange over the links of the world, after the records.

A rank's own records (random streams, loader position, changed buffers) go to its keeper, a rank on
another node, before anybody votes: a keeper casts its vote when it holds the records of its ward,
and nobody passes without having heard everybody. So a vote that passed anywhere implies that every
keeper holds the records of its ward as of that vote, and no acknowledgement is sent
(docs/decisions/0002-the-keepers-acknowledgement-is-its-vote.md). Commit barriers do the same.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tmover.core.rank import Vote
from tmover.errors import ProtocolError

_VOTE = struct.Struct("!q?I?q")
_HOLDING = struct.Struct("!I?16s16s")


class Holding(NamedTuple):
    """What a rank says in its first vote of what it holds, and in others if it has replicas."""

    copies: int
    """On how many other nodes it is set to keep copies."""
    late: bool
    """Whether what it alone holds changes after votes, so that no record has it as it is."""
    digest: bytes
    """Of what its replicas hold too."""
    role: bytes = bytes(16)
    """Of what it has built: ranks of one role have the same."""

    def encode(self) -> bytes:
        """Return it as bytes.

        >>> Holding.decode(Holding(2, True, b"d" * 16, b"r" * 16).encode())
        Holding(copies=2, late=True, digest=b'dddddddddddddddd', role=b'rrrrrrrrrrrrrrrr')
        """
        return _HOLDING.pack(*self)

    @classmethod
    def decode(cls, holds: bytes) -> Holding:
        """Return what a first vote says. Raises `ProtocolError` for anything else."""
        if len(holds) != _HOLDING.size:
            msg = f"a first vote that says what its rank holds in {len(holds)} bytes"
            raise ProtocolError(msg)
        return cls(*_HOLDING.unpack(holds))


def encode(vote: Vote) -> bytes:
    """Return the vote as bytes.

    >>> decode(encode(Vote(step=3, good=True, armed=2, held=1)))
    Vote(step=3, good=True, armed=2, checkpoint=False, holds=b'', held=1)
    """
    step, good, armed, checkpoint, holds, held = vote
    return _VOTE.pack(step, good, armed, checkpoint, held) + holds


def decode(payload: bytes) -> Vote:
    """Return a vote. Raises `ProtocolError` for anything that is none."""
    if len(payload) not in (_VOTE.size, _VOTE.size + _HOLDING.size):
        msg = f"a vote of {len(payload)} bytes"
        raise ProtocolError(msg)
    step, good, armed, checkpoint, held = _VOTE.unpack_from(payload)
    return Vote(step, good, armed, checkpoint, payload[_VOTE.size :], held)


class Kept:
    """The records of one other rank, as of its last two votes.

    Two, because a vote whose outcome is in doubt may end either way: step k+1 opens with the
    records of vote k, and a redo of k with those of vote k-1.
    """

    def __init__(self) -> None:
        self._records: dict[int, bytes] = {}

    def put(self, step: int, record: bytes) -> None:
        """Keep the records as of the vote on `step`."""
        self._records[step] = record
        for old in [known for known in self._records if known < step - 1]:
            del self._records[old]

    def get(self, step: int) -> bytes | None:
        """Return the records as of `step`, or None."""
        return self._records.get(step)
