"""The vote on an attempt: one exchange over the links of the world, which records ride on.

A rank's own records (random streams, loader position, changed buffers) go to its keeper, a rank on
another node, in the same frame as its vote. The keeper casts no vote of its own before it sent it
in the same exchange, and nobody passes without having heard everybody: so a vote that passed
anywhere implies that every keeper that lives has the records of its ward as of that vote
(docs/decisions/0002-the-keepers-acknowledgement-is-its-vote.md).
"""

from __future__ import annotations

import struct

from tmover.core.rank import Vote
from tmover.errors import ProtocolError

_VOTE = struct.Struct("!q?I")


def encode(vote: Vote) -> bytes:
    """Return the vote as bytes.

    >>> decode(encode(Vote(step=3, good=True, armed=2)))
    (Vote(step=3, good=True, armed=2), b'')
    """
    return _VOTE.pack(vote.step, vote.good, vote.armed)


def decode(payload: bytes) -> tuple[Vote, bytes]:
    """Return a vote and the records behind it. Raises `ProtocolError` for anything shorter."""
    if len(payload) < _VOTE.size:
        msg = f"a vote of {len(payload)} bytes"
        raise ProtocolError(msg)
    step, good, armed = _VOTE.unpack_from(payload)
    return Vote(step=step, good=good, armed=armed), payload[_VOTE.size :]


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
