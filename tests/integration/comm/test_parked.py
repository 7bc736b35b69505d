"""Links that one end has opened and the other has not taken yet, when worlds come and go."""

from __future__ import annotations

import functools
import select
import time
from collections.abc import Iterator

import pytest
import torch

from integration.comm.crew import DEADLINE_S, EVERYBODY, Job, Rank, Threads, carry_out, plan_of
from integration.comm.harness import SECRET
from tmover.comm.dial import dial
from tmover.comm.group import TmoverGroup
from tmover.comm.handshake import Hello
from tmover.comm.latch import Latch
from tmover.comm.listener import Key


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


def cut_in_dialing(rank: Rank, hello: Hello) -> None:
    """Leave a link parked whose dialer has closed it."""
    latch = Latch()
    dial(
        rank.fabric.endpoint,
        hello,
        secret=SECRET,
        source="127.0.0.1",
        latch=latch,
        deadline=time.monotonic() + DEADLINE_S,
    ).close()
    latch.close()
    listener = rank.fabric.wiring._listener
    with listener._arrived:  # held from the last word of the handshake on, until it is parked
        sock = listener._parked[Key(hello.group, hello.lane, hello.sender)].sock
    heard, _, _ = select.select([sock], [], [], DEADLINE_S)
    assert heard


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
    hello = Hello(
        job="job", epoch=1, group=EVERYBODY, lane="data", sender=high.uid, receiver=low.uid
    )
    cut_in_dialing(low, hello)
    what = Job("all_reduce", EVERYBODY, 3, 1)

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
