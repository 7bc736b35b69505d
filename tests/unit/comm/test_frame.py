from __future__ import annotations

import pytest

from tmover.comm.frame import HEADER, Kind, Op, Stamp, describe, parse


def test_a_header_reads_as_it_was_written() -> None:
    stamp = Stamp(Kind.DATA, Op.ALL_GATHER, 3, 7, 12, 4_000_000_000_000)

    head = parse(stamp.head(1 << 20))

    assert stamp.matches(head)
    assert head == (Kind.DATA, Op.ALL_GATHER, 3, 7, 12, 1 << 20, 4_000_000_000_000)


@pytest.mark.parametrize("field", ["kind", "op", "detail", "epoch", "seq", "total"])
def test_a_header_that_differs_anywhere_does_not_match(field: str) -> None:
    stamp = Stamp(Kind.DATA, Op.ALL_GATHER, 3, 7, 12, 400)
    head = parse(stamp.head(400))

    assert not stamp.matches(head._replace(**{field: getattr(head, field) + 1}))


def test_the_header_is_as_long_as_readers_expect() -> None:
    assert HEADER.size == 24


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Kind.DATA, "broadcast number 5 of 8 bytes"),
        (Kind.P2P, "message with tag 5 of 8 bytes"),
        (Kind.VOTE, "vote number 5"),
        (77, "frame of kind 77"),
    ],
)
def test_every_kind_of_frame_can_be_named(kind: int, words: str) -> None:
    assert describe(kind, Op.BROADCAST, 5, 8) == words
