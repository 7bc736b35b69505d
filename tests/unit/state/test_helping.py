"""Several sources for one receiver: what each sends, and what happens when one does not."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tmover.errors import LinkError, StateError
from tmover.state import shares
from tmover.state.capture import Tracked
from tmover.state.frames import CHUNK_BYTES
from tmover.state.helping import send_share
from tmover.state.memory import Layout
from tmover.state.messages import Purpose
from tmover.state.shares import chunks, sources_for, split
from tmover.state.transfer import receive_state, send_state

PURPOSE = Purpose("j", 3, 7)
WORDS = CHUNK_BYTES // 4
TIMEOUT_S = 20.0

# --- which chunks ---------------------------------------------------------------------------------


def bytes_of(*sizes: int) -> list[Layout]:
    return [Layout("uint8", (size,), (0,), "cpu") for size in sizes]


sizes = st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=12)


@given(sizes, st.data(), st.integers(1, 5))
def test_every_chunk_is_sent_once_and_what_is_not_alike_by_the_first(
    sizes: list[int], data: st.DataObject, sources: int
) -> None:
    alike = data.draw(st.sets(st.integers(0, len(sizes)), max_size=len(sizes)))

    parts = split(bytes_of(*sizes), alike, sources)

    assert len(parts) == sources
    assert sorted(chunk for part in parts for chunk in part) == chunks(sum(sizes))
    start = 0
    for number, size in enumerate(sizes):
        if number not in alike:
            own = range(start, start + size)
            assert not any(a < own.stop and own.start < b for part in parts[1:] for a, b in part)
        start += size


@given(st.integers(1, 40), st.integers(1, 5))
def test_all_send_about_the_same(count: int, sources: int) -> None:
    parts = split(bytes_of(count * CHUNK_BYTES), {0}, sources)

    assert max(map(len, parts)) - min(map(len, parts)) <= sources - 1
    assert max(map(len, parts)) == len(parts[0]) == -(-count // sources)


def test_a_source_that_would_send_little_is_left_out() -> None:
    least = shares.LEAST_BYTES

    assert [sources_for(size, 3) for size in (0, 2 * least - 1, 2 * least, 9 * least)] == [
        1,
        1,
        2,
        3,
    ]


# --- over sockets ---------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, fill: float, own: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((3 * WORDS + 5,), fill))
        self.register_buffer("seen", torch.full((WORDS,), own))
        self.b = nn.Parameter(torch.full((2 * WORDS, 2), fill))


def tracked(module: nn.Module) -> Tracked:
    found = Tracked()
    found.track("model", module)
    return found


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sources take part whatever the size."""
    monkeypatch.setattr(shares, "LEAST_BYTES", 1)


class Ends:
    """A receiver's connections to sources, and threads that send."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(8)
        self._socks: list[socket.socket] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair()
        self._socks += pair
        return pair

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(work)

    def first(self, source: Tracked, available: int) -> tuple[socket.socket, Future[Any]]:
        left, right = self.pair()
        send = functools.partial(
            send_state, left, job="j", epoch=3, step=7, tracked=source, record=b"r",
            available=available, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        return right, self.start(send)

    def other(
        self, source: Tracked, number: int, available: int, purpose: Purpose = PURPOSE
    ) -> tuple[socket.socket, Future[Any]]:
        left, right = self.pair()
        send = functools.partial(
            send_share, lambda: left, purpose, tracked=source, source=number,
            available=available, peer="joiner", timeout_s=TIMEOUT_S,
        )  # fmt: skip
        return right, self.start(send)

    def close(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._pool.shutdown()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    try:
        yield ends
    finally:
        ends.close()


def receive(
    sock: socket.socket, target: Tracked, others: Mapping[str, socket.socket], **more: Any
) -> Any:
    connect = {name: functools.partial(_given, other) for name, other in others.items()}
    return receive_state(
        sock, job="j", epoch=3, tracked=target, peer="main", others=connect,
        timeout_s=TIMEOUT_S, **more,
    )  # fmt: skip


def _given(sock: socket.socket) -> socket.socket:
    return sock


def test_replicas_send_what_is_alike_and_the_first_source_the_rest(ends: Ends) -> None:
    main, first = ends.first(tracked(Net(2.0, own=5.0)), 3)
    one, second = ends.other(tracked(Net(2.0, own=6.0)), 1, 3)
    two, third = ends.other(tracked(Net(2.0, own=7.0)), 2, 3)
    net = Net(0.0, own=0.0)

    received = receive(main, tracked(net), {"one": one, "two": two})

    assert (received.step, received.record) == (7, b"r")
    assert bool((net.a == 2).all())
    assert bool((net.b == 2).all())
    assert bool((net.get_buffer("seen") == 5).all())
    first.result(TIMEOUT_S)
    assert second.result(TIMEOUT_S) > 0
    assert third.result(TIMEOUT_S) > 0


def test_a_tensor_with_gaps_takes_parts_from_all(ends: Ends) -> None:
    main, _ = ends.first(tracked(Net(2.0, own=5.0)), 3)
    one, _ = ends.other(tracked(Net(2.0, own=6.0)), 1, 3)
    two, _ = ends.other(tracked(Net(2.0, own=7.0)), 2, 3)
    net = Net(0.0, own=0.0)
    wide = torch.zeros(2 * WORDS, 4)
    net.b = nn.Parameter(wide[:, ::2])

    receive(main, tracked(net), {"one": one, "two": two})

    assert bool((wide[:, ::2] == 2).all())
    assert not bool(wide[:, 1::2].any())


def test_nobody_waits_for_a_source_that_has_nothing_to_send(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "LEAST_BYTES", 1 << 40)
    main, _ = ends.first(tracked(Net(2.0, own=5.0)), 2)
    one, sent = ends.other(tracked(Net(2.0, own=6.0)), 1, 2)
    net = Net(0.0, own=0.0)

    receive(main, tracked(net), {"one": one})

    assert sent.result(TIMEOUT_S) == 0
    assert bool((net.a == 2).all())


@pytest.mark.parametrize(
    ("purpose", "fill", "says"),
    [
        (PURPOSE._replace(step=6), 2.0, "not the same as of the first source: step"),
        (PURPOSE._replace(epoch=2), 2.0, "not the same as of the first source: epoch"),
        (PURPOSE._replace(job="other"), 2.0, "not the same as of the first source: job"),
        (PURPOSE, 2.5, "not the same as of the first source: common"),
    ],
)
def test_a_part_of_another_state_is_refused_before_it_touches_anything(
    ends: Ends, purpose: Purpose, fill: float, says: str
) -> None:
    main, _ = ends.first(tracked(Net(2.0, own=5.0)), 2)
    one, sent = ends.other(tracked(Net(fill, own=6.0)), 1, 2, purpose)
    net = Net(0.0, own=0.0)

    with pytest.raises(LinkError, match=says) as raised:
        receive(main, tracked(net), {"one": one})

    assert raised.value.peers == ("one",)
    assert bool((net.a[: 3 * WORDS] == 2).all())  # the first source's part
    assert not bool(net.b.view(-1)[: 4 * WORDS - 5].any())
    with pytest.raises(StateError, match="joiner refused the state"):
        sent.result(TIMEOUT_S)


def test_another_model_is_refused(ends: Ends) -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__(2.0, own=6.0)
            self.c = nn.Parameter(torch.zeros(3))

    main, _ = ends.first(tracked(Net(2.0, own=5.0)), 2)
    one, _ = ends.other(tracked(Other()), 1, 2)

    with pytest.raises(LinkError, match="first source: schema"):
        receive(main, tracked(Net(0.0, own=0.0)), {"one": one})


def test_a_damaged_part_is_found_and_leaves_its_chunk_alone(ends: Ends) -> None:
    main, _ = ends.first(tracked(Net(2.0, own=5.0)), 2)
    source, _ = ends.other(tracked(Net(2.0, own=6.0)), 1, 2)
    left, right = ends.pair()
    ends.start(functools.partial(forward, source, left, damage_at=2 * CHUNK_BYTES))
    ends.start(functools.partial(forward, left, source, damage_at=-1))
    net = Net(0.0, own=0.0)

    with pytest.raises(LinkError, match="from one arrived damaged") as raised:
        receive(main, tracked(net), {"one": right})

    assert raised.value.peers == ("one",)
    values = net.b.detach().view(-1)
    assert set(values[:: WORDS // 16].tolist()) == {0.0, 2.0}


def forward(source: socket.socket, to: socket.socket, *, damage_at: int) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if passed <= damage_at < passed + len(data):
                data = bytes([data[0] ^ 1]) + data[1:]
            passed += len(data)
            to.sendall(data)


def test_what_broke_is_completed_from_another_source(ends: Ends) -> None:
    main, _ = ends.first(tracked(Net(2.0, own=5.0)), 2)
    source, broken = ends.pair()
    source.close()
    net = Net(0.0, own=0.0)
    target = tracked(net)
    with pytest.raises(LinkError, match="the state link to one broke"):
        receive(main, target, {"one": broken})

    again, _ = ends.first(tracked(Net(2.0, own=5.0)), 1)
    receive(again, target, {})

    assert bool((net.a == 2).all())
    assert bool((net.b == 2).all())


def test_a_source_that_comes_too_late_writes_nothing(ends: Ends) -> None:
    """The first source dies; meanwhile the part of another one is still to come."""
    left, right = ends.pair()
    late, far = ends.pair()
    begun, go_on = threading.Event(), threading.Event()

    def connect() -> socket.socket:
        begun.set()
        go_on.wait(TIMEOUT_S)
        return far

    def die() -> None:
        with contextlib.suppress(LinkError, StateError):
            send_state(
                Dying(left, begun), job="j", epoch=3, step=7, tracked=tracked(Net(2.0, own=5.0)),  # type: ignore[arg-type]  # a socket as far as this goes
                record=b"r", available=2, timeout_s=TIMEOUT_S,
            )  # fmt: skip

    ends.start(die)
    net = Net(0.0, own=0.0)
    with pytest.raises(LinkError, match="main"):
        receive_state(
            right, job="j", epoch=3, tracked=tracked(net), peer="main",
            others={"one": connect}, timeout_s=TIMEOUT_S,
        )  # fmt: skip
    before = net.b.detach().clone()

    sent = ends.start(
        lambda: send_share(
            lambda: late,
            PURPOSE,
            tracked=tracked(Net(2.0, own=6.0)),
            source=1,
            available=2,
            peer="joiner",
            timeout_s=TIMEOUT_S,
        )
    )
    go_on.set()
    with pytest.raises(LinkError):
        sent.result(TIMEOUT_S)
    assert torch.equal(net.b.detach(), before)


class Dying:
    """A socket that closes after its first chunk, once the other source is waited for."""

    def __init__(self, sock: socket.socket, when: threading.Event) -> None:
        self._sock = sock
        self._when = when
        self._sent = 0

    def sendmsg(self, pieces: list[memoryview]) -> int:
        if self._sent > CHUNK_BYTES:
            self._when.wait(TIMEOUT_S)
            self._sock.shutdown(socket.SHUT_RDWR)
        size = self._sock.sendmsg(pieces)
        self._sent += size
        return size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_more_sources_than_are_known_are_refused(ends: Ends) -> None:
    main, _ = ends.first(tracked(Net(2.0, own=5.0)), 3)

    with pytest.raises(StateError, match="3 sources are to send it, and 1 are known here"):
        receive(main, tracked(Net(0.0, own=0.0)), {})
