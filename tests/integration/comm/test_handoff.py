"""Sockets over which state is handed over: what they notice, and what wakes who is blocked in one.

A leaver has no world of the epoch it hands its state over for.
"""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from integration.comm.harness import SECRET, TIMEOUTS, uid_of
from tmover.comm.fabric import Fabric
from tmover.comm.timeouts import Timeouts
from tmover.errors import Interrupted, LinkError
from tmover.state.frames import Pipe

MUCH = bytes(64 << 20)
"""More than both sockets' buffers take."""
How = Callable[[Fabric], None]
ENDS: dict[str, How] = {
    "revoke": lambda fabric: fabric.revoke(2, "given up"),
    "rollback": lambda fabric: fabric.rollback(2),
    "close": lambda fabric: fabric.close(bye=True),
}


@contextlib.contextmanager
def a_fabric(name: str, timeouts: Timeouts = TIMEOUTS) -> Iterator[Fabric]:
    fabric = Fabric(
        job="job", secret=SECRET, uid=uid_of(name), address="127.0.0.1", timeouts=timeouts
    )
    try:
        yield fabric
    finally:
        fabric.close(bye=True)


@pytest.fixture
def leaver() -> Iterator[Fabric]:
    with a_fabric("leaver") as fabric:
        yield fabric


@pytest.fixture
def joiner() -> Iterator[Fabric]:
    with a_fabric("joiner") as fabric:
        yield fabric


def connected(leaver: Fabric, joiner: Fabric) -> tuple[socket.socket, socket.socket]:
    sent = leaver.connect_state(uid_of("joiner"), joiner.endpoint, epoch=2, timeout_s=10)
    return sent, joiner.accept_state(uid_of("leaver"), epoch=2, timeout_s=10)


@pytest.mark.parametrize("how", ENDS)
def test_a_sender_that_is_blocked_is_woken_when_its_epoch_is_over(
    leaver: Fabric, joiner: Fabric, how: str
) -> None:
    sock, other = connected(leaver, joiner)
    end = threading.Timer(0, ENDS[how], (leaver,))
    with sock, other:
        end.start()
        with pytest.raises(OSError) as caught:  # noqa: PT011 - which of several is the kernel's choice
            sock.sendall(MUCH)
        end.join()

    assert not isinstance(caught.value, TimeoutError)
    with pytest.raises(Interrupted):
        leaver.connect_state(uid_of("joiner"), joiner.endpoint, epoch=2, timeout_s=10)


@pytest.mark.parametrize("how", ENDS)
def test_who_waits_for_the_other_end_is_woken_when_its_epoch_is_over(
    leaver: Fabric, how: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        waits = (
            functools.partial(leaver.connect_state, uid_of("joiner"), endpoint),
            functools.partial(leaver.accept_state, uid_of("joiner")),
        )
        woken: list[str] = []

        def wait(call: Callable[..., socket.socket]) -> None:
            try:
                call(epoch=2, timeout_s=20)
            except Interrupted as error:
                woken.append(str(error))

        threads = [threading.Thread(target=wait, args=(call,)) for call in waits]
        for thread in threads:
            thread.start()
        assert select.select([silent], [], [], 10)[0]
        ENDS[how](leaver)
        for thread in threads:
            thread.join(10)

    assert len(woken) == 2


def test_an_epoch_that_is_given_up_ends_no_other(leaver: Fabric, joiner: Fabric) -> None:
    sock, other = connected(leaver, joiner)
    with sock, other:
        leaver.rollback(1)
        leaver.revoke(3, "given up")
        sock.sendall(b"state")
        assert other.recv(5) == b"state"


def test_the_configured_patience_is_that_of_one_read() -> None:
    hasty = Timeouts(state_s=0.05)
    with a_fabric("leaver", hasty) as leaver, a_fabric("joiner") as joiner:
        sock, other = connected(leaver, joiner)
        with sock, other, pytest.raises(LinkError, match=r"stood still for 0.05 s") as caught:
            Pipe(sock, peer="joiner", timeout_s=600).receive(memoryview(bytearray(8)))

    assert caught.value.peers == ("joiner",)


def test_a_node_that_vanishes_is_noticed_and_one_that_thinks_is_not(
    leaver: Fabric, joiner: Fabric
) -> None:
    """The kernel breaks a connection on which nothing is read for the last of these, too."""
    for sock in connected(leaver, joiner):
        with sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            found = tuple(sock.getsockopt(socket.IPPROTO_TCP, option) for option in options)
            assert found == (TIMEOUTS.idle_s, TIMEOUTS.interval_s, TIMEOUTS.probes)
            unacked_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert unacked_ms == TIMEOUTS.state_s * 1000
