"""Links that one end has opened and the other has not taken yet, when worlds come and go."""

from __future__ import annotations

import functools
import select
import socket
import time
from collections.abc import Iterator

import pytest
import torch

from integration.comm.crew import DEADLINE_S, EVERYBODY, Job, Rank, Threads, carry_out, plan_of
from integration.comm.harness import SECRET
from support.eventually import eventually
from tmover.comm.dial import dial
from tmover.comm.group import TmoverGroup
from tmover.comm.handshake import Hello
from tmover.comm.latch import Latch
from tmover.comm.listener import Key
from tmover.comm.world import message_lanes
from tmover.errors import Interrupted


@pytest.fixture
def pair() -> Iterator[list[Rank]]:
    ranks = [Rank("a"), Rank("z")]
    for place, rank in enumerate(ranks):
        rank.take(place, {EVERYBODY: (0, 1)})
    yield ranks
    for rank in ranks:
        rank.end(bye=True)


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()


def cross(
    threads: Threads, ranks: list[Rank], epoch: int, *, entering: list[Rank], relink: bool = False
) -> None:
    """Let all prepare and pass, and some enter."""
    plan = plan_of(epoch, ranks)
    pairs = [(ranks[0].uid, ranks[1].uid)] if relink else []

    def pass_barrier(rank: Rank) -> None:
        rank.fabric.prepare(plan, timeout_s=10, relink=pairs)
        rank.fabric.barrier(epoch)

    threads.together([functools.partial(pass_barrier, rank) for rank in ranks])
    for rank in entering:
        rank.fabric.commit(epoch)


def dial_for(rank: Rank, other: Rank, lane: str) -> socket.socket:
    """Return a link that a rank has dialed to another one, and knows nothing of."""
    latch = Latch()
    hello = Hello(
        job="job", epoch=1, group=EVERYBODY, lane=lane, sender=rank.uid, receiver=other.uid
    )
    deadline = time.monotonic() + DEADLINE_S
    sock = dial(
        other.fabric.endpoint,
        hello,
        secret=SECRET,
        source="127.0.0.1",
        latch=latch,
        deadline=deadline,
    )
    latch.close()
    sock.settimeout(DEADLINE_S)
    return sock


def send(rank: Rank, value: int) -> None:
    group = rank.fabric.groups[EVERYBODY]
    assert isinstance(group, TmoverGroup)
    group.send([torch.tensor([value])], 1 - rank.place).wait()


def receive(rank: Rank) -> int:
    group, tensor = rank.fabric.groups[EVERYBODY], torch.zeros(1, dtype=torch.int64)
    assert isinstance(group, TmoverGroup)
    group.recv([tensor], 1 - rank.place).wait()
    return int(tensor)


def test_what_a_stayer_has_opened_in_a_world_that_this_rank_never_entered_is_kept(
    pair: list[Rank], threads: Threads
) -> None:
    """The stayer goes on to use it: it cannot know who was stuck in the barrier."""
    low, high = pair
    cross(threads, pair, 1, entering=pair)
    cross(threads, pair, 2, entering=[high])
    send(high, 2)
    for rank in pair:
        rank.fabric.revoke(2, "a test says so")

    cross(threads, pair, 3, entering=pair)

    assert threads.together([lambda: send(high, 3), lambda: receive(low)]) == [None, 3]


def test_a_collective_does_not_go_over_a_link_that_was_cut_in_dialing(
    pair: list[Rank], threads: Threads
) -> None:
    """Its dialer has gone, and dials once more."""
    low, high = pair
    cross(threads, pair, 1, entering=pair)
    dial_for(high, low, "data").close()
    listener = low.fabric.wiring._listener
    with listener._arrived:  # held from the last word of the handshake on, until it is parked
        sock = listener._parked[Key(EVERYBODY, "data", high.uid)].sock
    heard, _, _ = select.select([sock], [], [], DEADLINE_S)
    assert heard
    what = Job("all_reduce", EVERYBODY, 3, 1)

    assert threads.together([lambda: carry_out(low, what), lambda: carry_out(high, what)]) == [
        True,
        True,
    ]


def test_a_collective_does_not_go_over_a_link_that_was_taken_before_it_was_cut_in_dialing(
    pair: list[Rank], threads: Threads
) -> None:
    """Its dialer was revoked before it heard that it is let in, and dials in the next world."""
    low, high = pair
    cross(threads, pair, 1, entering=pair)
    dialed = dial_for(high, low, "data")

    def is_over() -> None:
        with pytest.raises(Interrupted):
            carry_out(low, Job("all_reduce", EVERYBODY, 3, 1))

    def revoke() -> None:
        assert dialed.recv(1)  # so it was taken
        high.fabric.revoke(1, "a test says so")
        dialed.close()

    threads.together([is_over, revoke])
    low.await_revocation(1)
    cross(threads, pair, 2, entering=pair)
    what = Job("all_reduce", EVERYBODY, 3, 2)

    assert threads.together([lambda: carry_out(low, what), lambda: carry_out(high, what)]) == [
        True,
        True,
    ]


def test_what_was_never_taken_goes_with_the_peer_it_belonged_to(
    pair: list[Rank], threads: Threads
) -> None:
    low, high = pair
    cross(threads, pair, 1, entering=pair)
    send(low, 1)
    cross(threads, pair, 2, entering=pair, relink=True)
    assert high.fabric.wiring._listener._parked

    for rank in pair:
        rank.fabric.release(2)

    assert not high.fabric.wiring._listener._parked
    assert threads.together([lambda: send(low, 2), lambda: receive(high)]) == [None, 2]


def test_a_message_does_not_come_over_a_link_that_was_taken_before_it_was_cut_in_dialing(
    pair: list[Rank], threads: Threads
) -> None:
    low, high = pair
    cross(threads, pair, 1, entering=pair)
    dialed = dial_for(high, low, "message")

    def is_over() -> None:
        with pytest.raises(Interrupted):
            receive(low)

    def revoke() -> None:
        peer = low.fabric.present().peers[1]
        eventually(lambda: peer.lanes.get(message_lanes(EVERYBODY)[1]))
        for rank in pair:
            rank.fabric.revoke(1, "a test says so")

    threads.together([is_over, revoke])
    dialed.close()
    cross(threads, pair, 2, entering=pair)

    assert threads.together([lambda: send(high, 2), lambda: receive(low)]) == [None, 2]
