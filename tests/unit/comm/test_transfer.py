"""Links over a socket pair: what is half sent or half received never reaches the next epoch."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmover.comm.frame import SEGMENT, Kind, Op, Stamp
from tmover.comm.latch import Latch
from tmover.comm.link import Link
from tmover.comm.transfer import Collect, Fold, Onto, Receive, Send, transfer
from tmover.errors import Interrupted, LinkError, ProtocolError

NOTHING_BURNT: frozenset[int] = frozenset()
BOTH = tuple[Link, Link]


def pair() -> BOTH:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    return Link(ends[0], "left"), Link(ends[1], "right")


@pytest.fixture
def links() -> Iterator[BOTH]:
    made = pair()
    yield made
    for link in made:
        link.close()


@pytest.fixture
def latch() -> Iterator[Latch]:
    made = Latch()
    yield made
    made.close()


def stamp(epoch: int, total: int, *, op: Op = Op.BROADCAST, seq: int = 1) -> Stamp:
    return Stamp(Kind.DATA, op, 0, epoch, seq, total)


def send(link: Link, data: bytes, epoch: int = 1) -> Send:
    return Send(link, stamp(epoch, len(data)), memoryview(data))


def receive(link: Link, size: int, epoch: int = 1) -> tuple[Receive, bytearray]:
    into = bytearray(size)
    made = Receive(link, stamp(epoch, size), memoryview(into), NOTHING_BURNT.__contains__)
    return made, into


def carry(out: Send, into: Receive) -> None:
    """Let both ends make progress until the message is through."""
    sent = received = False
    while not received:
        sent = sent or out.step()
        received = into.step()
    assert sent or out.step()


def pattern(size: int, salt: int) -> bytes:
    return bytes((i * 7 + salt) % 251 for i in range(251)) * (size // 251) + bytes([salt]) * (
        size % 251
    )


@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, SEGMENT, SEGMENT + 1, 3 * SEGMENT])
def test_a_message_arrives_as_it_was_sent(links: BOTH, size: int) -> None:
    data = bytes(bytearray(range(256)) * (size // 256 + 1))[:size]
    incoming, into = receive(links[1], size)

    carry(send(links[0], data), incoming)

    assert bytes(into) == data


def test_several_short_messages_read_at_once_stay_apart(links: BOTH) -> None:
    for salt in range(3):
        assert send(links[0], pattern(100, salt)).step()

    for salt in range(3):
        incoming, into = receive(links[1], 100)
        assert incoming.step()
        assert bytes(into) == pattern(100, salt)


def test_a_frame_of_a_lower_epoch_is_discarded(links: BOTH) -> None:
    assert send(links[0], b"old" * 100, epoch=1).step()
    incoming, into = receive(links[1], 3, epoch=2)

    carry(send(links[0], b"new", epoch=2), incoming)

    assert bytes(into) == b"new"


def test_a_frame_of_a_burnt_epoch_is_discarded_though_it_is_higher(links: BOTH) -> None:
    assert send(links[0], b"burnt", epoch=5).step()
    assert send(links[0], b"new", epoch=2).step()
    into = bytearray(3)

    assert Receive(links[1], stamp(2, 3), memoryview(into), {5}.__contains__).step()
    assert bytes(into) == b"new"


def test_a_frame_of_a_higher_epoch_ends_the_epoch_here_and_is_kept(links: BOTH) -> None:
    assert send(links[0], b"new", epoch=5).step()
    early, _ = receive(links[1], 3, epoch=2)

    with pytest.raises(Interrupted, match="in epoch 5 already"):
        early.step()

    late, into = receive(links[1], 3, epoch=5)
    assert late.step()
    assert bytes(into) == b"new"


@settings(deadline=None)
@given(
    script=st.lists(
        st.tuples(
            st.sampled_from([0, 5, 5000, 90_000, SEGMENT + 5]),
            st.integers(0, 12),
            st.integers(0, 12),
        ),
        max_size=6,
    )
)
def test_whatever_was_given_up_the_next_epochs_message_is_whole(
    script: list[tuple[int, int, int]],
) -> None:
    """Each epoch but the last is broken off after some progress at either end."""
    links = pair()
    for epoch, (size, sends, receives) in enumerate(script, start=1):
        outgoing = send(links[0], pattern(size, epoch), epoch)
        incoming, _ = receive(links[1], size, epoch)
        done = [False, False]
        for turn in range(max(sends, receives)):
            if turn < sends and not done[0]:
                done[0] = outgoing.step()
            if turn < receives and not done[1]:
                done[1] = incoming.step()
        for link in links:
            link.abandon()
    last = len(script) + 1
    incoming, into = receive(links[1], 100_000, last)

    carry(send(links[0], pattern(100_000, last), last), incoming)

    assert bytes(into) == pattern(100_000, last)
    for link in links:
        link.close()


def test_giving_up_pads_out_one_frame_at_most(links: BOTH) -> None:
    assert not send(links[0], bytes(8 * SEGMENT)).step()

    links[0].abandon()

    assert 0 < links[0]._pad <= SEGMENT


def test_messages_are_folded_in_frame_by_frame(links: BOTH) -> None:
    data = pattern(2 * SEGMENT + 10, 3)
    scratch, seen = bytearray(SEGMENT), bytearray(len(data))

    def fold(offset: int, length: int) -> None:
        seen[offset : offset + length] = scratch[:length]

    incoming = Fold(
        links[1],
        stamp(1, len(data)),
        memoryview(scratch),
        NOTHING_BURNT.__contains__,
        onto=Onto(size=len(data), fold=fold),
    )

    carry(send(links[0], data), incoming)

    assert bytes(seen) == data


@pytest.mark.parametrize("size", [0, 3, 100_000])
def test_a_message_may_be_of_a_length_only_its_sender_knows(links: BOTH, size: int) -> None:
    data = pattern(size, 1)
    incoming = Collect(links[1], stamp(1, 0), NOTHING_BURNT.__contains__)

    carry(send(links[0], data), incoming)

    assert bytes(incoming.data) == data


def test_different_sizes_are_named(links: BOTH) -> None:
    assert send(links[0], b"12345678").step()
    incoming, _ = receive(links[1], 4)

    with pytest.raises(
        ProtocolError,
        match=r"right sends broadcast number 1 of 8 bytes, .* waits for broadcast number 1 of 4",
    ):
        incoming.step()


def test_different_collectives_are_named(links: BOTH) -> None:
    assert Send(links[0], stamp(1, 4, op=Op.ALL_REDUCE, seq=9), memoryview(b"1234")).step()
    incoming, _ = receive(links[1], 4)

    with pytest.raises(ProtocolError, match=r"sends all_reduce number 9 .* waits for broadcast"):
        incoming.step()


def test_a_different_type_is_named(links: BOTH) -> None:
    other = stamp(1, 4)._replace(detail=5)
    assert Send(links[0], other, memoryview(b"1234")).step()
    incoming, _ = receive(links[1], 4)

    with pytest.raises(ProtocolError, match="of another type, reduction or root"):
        incoming.step()


def test_a_peer_that_is_gone_is_named(links: BOTH, latch: Latch) -> None:
    incoming, _ = receive(links[1], 4)
    links[0].close()

    with pytest.raises(LinkError, match="link to right: closed by the other end") as caught:
        transfer([], [incoming], latch, 5.0)

    assert caught.value.peers == ("right",)


def test_a_set_latch_ends_a_transfer_that_waits(links: BOTH, latch: Latch) -> None:
    incoming, _ = receive(links[1], 4)
    latch.set("enough")

    with pytest.raises(Interrupted, match="enough"):
        transfer([], [incoming], latch, 5.0)


def test_a_transfer_that_does_not_move_ends_at_its_deadline(links: BOTH, latch: Latch) -> None:
    incoming, _ = receive(links[1], 4)

    with pytest.raises(LinkError, match=r"nothing from right within 0.01 s") as caught:
        transfer([], [incoming], latch, 0.01)

    assert caught.value.peers == ("right",)
