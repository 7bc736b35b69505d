"""Values that are told and heard, over real connections inside one process."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from support.eventually import eventually
from tmover.comm.errands import Errands
from tmover.comm.frame import Kind, Op, Stamp
from tmover.comm.latch import Latch
from tmover.comm.link import Link
from tmover.comm.rendezvous import Rendezvous, Until
from tmover.comm.sockets import speaking
from tmover.comm.world import RENDEZVOUS, Peer
from tmover.core.events import Member
from tmover.errors import Interrupted, LinkError


class End:
    """One of two processes, as the other one sees it."""

    def __init__(self, name: str, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.peer = Peer(Member(rank=0, worker=name, node=name, endpoint=""), 1)
        self.peer.lanes[RENDEZVOUS] = Link(sock, name)
        self.rendezvous = Rendezvous()
        self.rendezvous.join(self.peer)

    def close(self) -> None:
        self.rendezvous.leave(self.peer)
        self.rendezvous.close()
        self.peer.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    one, other = socket.socketpair()
    ends = End("b", one), End("a", other)
    yield ends
    for end in ends:
        end.close()


def soon(latch: Latch | None = None) -> Until:
    return Until(latch or Latch(), time.monotonic() + 10)


def test_what_is_told_is_heard_there_and_known_here(ends: tuple[End, End]) -> None:
    a, b = ends
    a.rendezvous.tell([a.peer], 3, "key", b"value" * 10_000, until=soon())

    heard = b.rendezvous.hear(3, {"key": b.peer}, until=soon(), among=[b.peer])

    assert heard == [b"value" * 10_000]
    assert a.rendezvous.knows(3, ["key"])
    assert not b.rendezvous.knows(4, ["key"])


def test_what_is_forgotten_is_not_known_any_more(ends: tuple[End, End]) -> None:
    a, _ = ends
    for epoch in (1, 2):
        a.rendezvous.tell([], epoch, "key", b"", until=soon())

    a.rendezvous.forget(lambda epoch, _: epoch < 2)

    assert [a.rendezvous.knows(epoch, ["key"]) for epoch in (1, 2)] == [False, True]


def test_who_waits_is_told_whom_for_when_it_takes_too_long(ends: tuple[End, End]) -> None:
    a, _ = ends
    with pytest.raises(LinkError, match="too long for b") as caught:
        a.rendezvous.hear(
            1, {"key": a.peer}, until=Until(Latch(), time.monotonic()), among=[a.peer]
        )
    assert caught.value.peers == ("b",)


def test_who_waits_is_woken_when_the_epoch_is_over(ends: tuple[End, End]) -> None:
    a, _ = ends
    latch = Latch()

    def over() -> None:
        latch.set("it is over")
        a.rendezvous.wake()

    Errands().send("end", over)
    with pytest.raises(Interrupted, match="it is over"):
        a.rendezvous.hear(1, {"key": None}, until=soon(latch), among=[a.peer])


def test_who_waits_for_one_who_is_gone_is_told_so(ends: tuple[End, End]) -> None:
    a, b = ends
    b.peer.lanes[RENDEZVOUS].sock.shutdown(socket.SHUT_RDWR)

    for wanted in ({"key": a.peer}, {"key": None}):
        with pytest.raises(LinkError) as caught:
            a.rendezvous.hear(1, wanted, until=soon(), among=[a.peer])
        assert caught.value.peers == ("b",)


def test_a_message_that_is_none_breaks_the_link(ends: tuple[End, End]) -> None:
    a, b = ends
    link = b.peer.lanes[RENDEZVOUS]
    assert link.put(Stamp(Kind.STORE, Op.NONE, 0, 1, 0, 1).head(1), memoryview(b"?"))

    with pytest.raises(LinkError, match="without a key"):
        a.rendezvous.hear(1, {"key": None}, until=soon(), among=[a.peer])


def test_a_frame_of_another_kind_breaks_the_link(ends: tuple[End, End]) -> None:
    a, b = ends
    assert b.peer.lanes[RENDEZVOUS].put(Stamp(Kind.VOTE, Op.NONE, 0, 1, 0, 0).head(0))

    with pytest.raises(LinkError, match="has no place here"):
        a.rendezvous.hear(1, {"key": None}, until=soon(), among=[a.peer])


def test_a_peer_that_was_left_cannot_be_told_anything(ends: tuple[End, End]) -> None:
    a, _ = ends
    a.rendezvous.leave(a.peer)

    with pytest.raises(LinkError, match="not there any more"):
        a.rendezvous.tell([a.peer], 1, "key", b"", until=soon())


# --- what may hang --------------------------------------------------------------------------------


def test_an_errand_returns_or_raises_what_it_did() -> None:
    errands, late = Errands(), list[int]()

    assert errands.run("one", lambda: 1, until=soon(), late=late.append) == 1
    with pytest.raises(ZeroDivisionError):
        errands.run("none", lambda: 1 // 0, until=soon(), late=late.append)
    assert late == []


def test_an_errand_that_is_given_up_hands_over_what_it_did_all_the_same() -> None:
    errands, late, latch, may_end = Errands(), list[int](), Latch(), Latch()
    latch.set("given up")

    def slow() -> int:
        assert eventually(lambda: may_end.is_set, timeout_s=10)
        return 1

    with pytest.raises(Interrupted, match="given up"):
        errands.run("slow", slow, until=soon(latch), late=late.append)

    assert not errands.settle(0)
    may_end.set("now")
    assert errands.settle(10)
    assert late == [1]


# --- sockets by address ---------------------------------------------------------------------------


def test_sockets_are_found_by_either_end_and_only_connections_are_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        port = server.getsockname()[1]
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + b"\x7f\0\0\1"

        found = speaking(b"before" + address + b"after")

        assert {handle.fd for handle in found} == {s.fileno() for s in (server, one, other)}
        assert [h.fd for h in found if not h.connected] == [server.fileno()]
        for handle in found:
            handle.shut_down()
        assert one.recv(1) == b""
        with socket.create_connection(server.getsockname()):
            one.close()
            other.close()


def test_a_number_that_was_used_again_is_left_alone() -> None:
    first, peer = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        port = server.getsockname()[1]
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + b"\x7f\0\0\1"
        (handle,) = [h for h in speaking(address) if h.fd == one.fileno()]
        one.close()
        os.dup2(first.fileno(), handle.fd)

        handle.shut_down()
        handle.close_in_child()

        peer.send(b"x")
        assert os.read(handle.fd, 1) == b"x"
        os.close(handle.fd)
    first.close()
    peer.close()
