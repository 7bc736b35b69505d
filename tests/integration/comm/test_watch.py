"""The thread that listens to the peers: it is told and untold of them while it listens."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import TIMEOUTS, Board, in_fabrics
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.frame import Header, Kind
from tmover.comm.link import Link
from tmover.comm.watch import Watch
from tmover.comm.world import CONTROL, Peer
from tmover.core.events import Member
from tmover.errors import TmoverError


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for sock in made:
        sock.close()


def connected(ends: list[socket.socket]) -> Peer:
    """Return a peer whose control link ends in the last of `ends`."""
    here, there = socket.socketpair()
    here.setblocking(False)
    ends += [here, there]
    peer = Peer(Member(rank=1, worker="b/0", node="b", endpoint=""), 1)
    peer.lanes[CONTROL] = Link(here, "b/0")
    return peer


class Shared(Link):
    """A link that two threads stop listening to: each looks at its number, then they meet."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.meeting: threading.Barrier | None = None
        self._looks = threading.local()
        super().__init__(sock, peer)

    @property
    def fd(self) -> int:
        """Its number; who looks a second time waits until the other one does, if he can."""
        self._looks.count = getattr(self._looks, "count", 0) + 1
        if self.meeting is not None and self._looks.count == 2:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.meeting.wait(0.2)
        return self._fd

    @fd.setter
    def fd(self, value: int) -> None:
        self._fd = value


def test_two_threads_may_stop_listening_to_the_same_peer(ends: list[socket.socket]) -> None:
    """A leaver hangs up while `Done` says that it may be forgotten."""
    failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    watch = Watch(on_word=lambda *_: None, on_lost=lambda _: None, on_failure=failed.put)
    peer = connected(ends)
    link = peer.lanes[CONTROL] = Shared(ends[0], "b/0")
    watch.add(peer)
    link.meeting = threading.Barrier(2)

    with ThreadPoolExecutor(2) as threads:
        outcomes = [threads.submit(watch.remove, peer) for _ in range(2)]
    watch.close()

    assert [outcome.exception() for outcome in outcomes] == [None, None]


def test_what_ends_the_listening_is_told(ends: list[socket.socket]) -> None:
    def hear(_peer: Peer, _head: Header) -> None:
        msg = "a fault of ours"
        raise KeyError(msg)

    failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    watch = Watch(on_word=hear, on_lost=lambda _: None, on_failure=failed.put)
    watch.add(connected(ends))
    other = Link(ends[-1], "a/0")
    speaker = Peer(Member(rank=0, worker="a/0", node="a", endpoint=""), 1)
    speaker.lanes[CONTROL] = other

    speaker.say(Kind.REVOKE, 1)

    assert isinstance(failed.get(timeout=10), KeyError)
    watch.close()


def test_a_rank_that_cannot_hear_its_peers_any_more_breaks_its_world_and_fails() -> None:
    def member(fabric: Fabric, board: Board, name: str) -> None:
        if name == "n1":
            board.get("over")
            return
        revoked = threading.Event()

        def broken(_epoch: int, _peers: tuple[str, ...], _reason: str) -> None:
            msg = "a fault of ours"
            raise KeyError(msg)

        fabric.on_broken = broken
        latch = fabric.present().latch
        fabric.present().peers[1].lanes[CONTROL].sock.shutdown(socket.SHUT_RDWR)
        while fabric.fault is None:
            revoked.wait(0.01)
        assert latch.is_set
        assert fabric.mode is Mode.REVOKED
        for act in (lambda: fabric.exchange(b""), fabric.quiesce, lambda: fabric.barrier(2)):
            with pytest.raises(TmoverError, match="cannot hear its peers"):
                act()
        board.put("over")

    in_fabrics(member, 2)


def test_a_peer_that_reads_nothing_for_long_is_only_given_up_by_the_lane_that_is_always_read() -> (
    None
):
    def program(fabric: Fabric, board: Board, name: str) -> dict[str, int]:
        dist.all_reduce(torch.ones(3))
        world = fabric.present()
        (peer,) = world.peers.values()
        return {
            lane.use: link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            for lane, link in peer.lanes.items()
        }

    found = in_fabrics(program, 2, nearby=False)

    assert found["n0"]["control"] == TIMEOUTS.unacked_s * 1000
    assert {"vote", "data"} <= found["n0"].keys()
    assert not any(ms for use, ms in found["n0"].items() if use != "control")
