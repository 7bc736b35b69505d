"""Who may open a link, and what strangers can do to a listener."""

from __future__ import annotations

import logging
import pathlib
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from support.eventually import eventually
from tmover.comm.dial import dial
from tmover.comm.handshake import MAGIC, Dialer, Hello
from tmover.comm.latch import Latch
from tmover.comm.listener import Key, Late, Listener
from tmover.errors import Interrupted, LinkError

SECRET = b"s" * 32
HELLO = Hello(job="7", epoch=3, group="g", lane="data", sender="b/0", receiver="a/0")
KEY = Key("g", "data", "b/0")


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(
        "127.0.0.1",
        secret=SECRET,
        check=lambda hello: f"epoch {hello.epoch} is over" if hello.epoch < 3 else "",
        handshake_s=0.2,
    )
    yield made
    made.close()


@pytest.fixture
def latch() -> Iterator[Latch]:
    made = Latch()
    yield made
    made.close()


def soon() -> float:
    return time.monotonic() + 10


def call(
    listener: Listener, latch: Latch, hello: Hello = HELLO, secret: bytes = SECRET
) -> socket.socket:
    return dial(
        listener.endpoint, hello, secret=secret, source="127.0.0.1", latch=latch, deadline=soon()
    )


def test_a_link_is_handed_to_who_waits_for_it(listener: Listener, latch: Latch) -> None:
    dialed = call(listener, latch)
    with dialed, listener.take(KEY, since=3, latch=latch, deadline=soon()) as taken:
        dialed.send(b"ping")
        taken.setblocking(True)
        assert taken.recv(4) == b"ping"


def test_a_link_of_an_epoch_before_is_not_taken(listener: Listener, latch: Latch) -> None:
    late = time.monotonic() + 0.02
    with call(listener, latch), pytest.raises(Late, match="no link came from b/0") as caught:
        listener.take(KEY, since=4, latch=latch, deadline=late)

    assert caught.value.peers == ("b/0",)
    assert isinstance(caught.value, TimeoutError)


def test_a_later_link_for_the_same_use_replaces_the_one_before(
    listener: Listener, latch: Latch
) -> None:
    first, second = call(listener, latch), call(listener, latch)
    first.settimeout(5)
    assert first.recv(1) == b""
    with first, second, listener.take(KEY, since=3, latch=latch, deadline=soon()) as taken:
        second.send(b"x")
        taken.setblocking(True)
        assert taken.recv(1) == b"x"


def cut_in_dialing(listener: Listener) -> None:
    """Leave a link that is parked, and whose dialer has gone before it heard that it is."""
    arrived = threading.Event()
    listener.subscribe(KEY.group, KEY.lane, arrived.set)
    host, _, port = listener.endpoint.rpartition(":")
    dialer = Dialer(HELLO, SECRET)
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(dialer.start())
        sock.sendall(dialer.feed(sock.recv(dialer.needs, socket.MSG_WAITALL)))
    assert arrived.wait(10)
    heard, _, _ = select.select([listener._parked[KEY].sock], [], [], 10)
    assert heard


def test_a_link_that_was_cut_in_dialing_is_nobodys(listener: Listener) -> None:
    cut_in_dialing(listener)

    assert listener.glance(KEY, since=0) is None
    assert not listener._parked


def test_who_waits_gets_the_link_that_comes_after_one_that_was_cut(
    listener: Listener, latch: Latch
) -> None:
    cut_in_dialing(listener)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(listener.take, KEY, since=3, latch=latch, deadline=soon())
        with call(listener, latch) as dialed, waits.result(10) as taken:
            dialed.send(b"ping")
            taken.setblocking(True)
            assert taken.recv(4) == b"ping"


def test_a_link_whose_dialer_said_something_and_left_is_handed_out(
    listener: Listener, latch: Latch
) -> None:
    with call(listener, latch) as dialed:
        dialed.send(b"ping")

    with listener.take(KEY, since=3, latch=latch, deadline=soon()) as taken:
        taken.setblocking(True)
        assert [taken.recv(9), taken.recv(9)] == [b"ping", b""]


def test_a_wrong_secret_is_refused(listener: Listener, latch: Latch) -> None:
    with pytest.raises(LinkError, match="does not hold this job's secret"):
        call(listener, latch, secret=b"o" * 32)

    assert listener.glance(KEY, since=0) is None


def test_a_refused_hello_gets_the_reason(listener: Listener, latch: Latch) -> None:
    with pytest.raises(LinkError, match="a/0 refused the link: epoch 2 is over"):
        call(listener, latch, msgspec.structs.replace(HELLO, epoch=2))


def test_strangers_neither_block_nor_stay(listener: Listener, latch: Latch) -> None:
    host, _, port = listener.endpoint.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(5)]
    noisy = socket.create_connection((host, int(port)))
    noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")

    with call(listener, latch):
        listener.take(KEY, since=3, latch=latch, deadline=soon()).close()

    for stranger in (*silent, noisy):
        stranger.settimeout(5)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            assert stranger is noisy
        stranger.close()


def test_a_stranger_whose_hello_is_nested_too_deeply_ends_only_his_own_visit(
    listener: Listener, latch: Latch
) -> None:
    host, _, port = listener.endpoint.rpartition(":")
    said = b"\x81\xa1x" + b"\x91" * 4000
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(MAGIC + struct.pack("<H", len(said)) + said)
        assert stranger.recv(1) == b""

    with call(listener, latch):
        listener.take(KEY, since=3, latch=latch, deadline=soon()).close()


def test_no_visitor_can_end_the_listening_whatever_goes_wrong_with_him(
    latch: Latch, caplog: pytest.LogCaptureFixture
) -> None:
    def check(hello: Hello) -> str:
        if hello.epoch < 3:
            msg = "a fault of ours"
            raise KeyError(msg)
        return ""

    caplog.set_level(logging.WARNING)
    made = Listener("127.0.0.1", secret=SECRET, check=check, handshake_s=5)
    try:
        for _ in range(2):
            with pytest.raises(LinkError, match="hung up"):
                call(made, latch, msgspec.structs.replace(HELLO, epoch=2))
        with call(made, latch):
            made.take(KEY, since=3, latch=latch, deadline=soon()).close()
    finally:
        made.close()

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a fault of ours" in caplog.text


def test_waiting_ends_when_the_latch_is_set(listener: Listener, latch: Latch) -> None:
    latch.set("enough")

    with pytest.raises(Interrupted, match="enough"):
        listener.take(KEY, since=3, latch=latch, deadline=soon())
    with pytest.raises(Interrupted, match="enough"):
        call(listener, latch)


def test_dialing_nobody_says_whom(latch: Latch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"

    with pytest.raises(LinkError, match=r"no link to a/0 at 127.0.0.1:.*refused"):
        dial(endpoint, HELLO, secret=SECRET, source="127.0.0.1", latch=latch, deadline=soon())


def test_dialing_somebody_who_never_answers_ends(latch: Latch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(LinkError, match="no answer in time"):
            dial(
                endpoint,
                HELLO,
                secret=SECRET,
                source="127.0.0.1",
                latch=latch,
                deadline=time.monotonic() + 0.02,
            )


def test_who_cannot_be_let_in_for_want_of_descriptors_is_let_in_later(
    listener: Listener, latch: Latch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is it tried without end: the door stays open, and says so again at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    host, _, port = listener.endpoint.rpartition(":")
    with socket.socket() as sock, caplog.at_level(logging.WARNING):
        sock.settimeout(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, hard))
        try:
            sock.connect((host, int(port)))
            eventually(lambda: "a link has to wait" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sock.sendall(Dialer(HELLO, SECRET).start())
        assert sock.recv(1)

    assert caplog.text.count("a link has to wait") == 1


def test_strangers_use_up_no_more_than_their_part_of_the_descriptors(latch: Latch) -> None:
    """Those who take longest make room, so that who belongs here is let in all the same."""
    made = Listener("127.0.0.1", secret=SECRET, check=lambda _: "", handshake_s=60)
    host, _, port = made.endpoint.rpartition(":")
    descriptors = pathlib.Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    crowd = [socket.create_connection((host, int(port)), timeout=30) for _ in range(600)]
    try:
        with dial(
            made.endpoint, HELLO, secret=SECRET, source="127.0.0.1", latch=latch,
            deadline=time.monotonic() + 30,
        ):  # fmt: skip
            made.take(KEY, since=3, latch=latch, deadline=soon()).close()
        assert len(list(descriptors.iterdir())) <= before + len(crowd) + 512 + 4
        crowd[0].settimeout(10)
        assert crowd[0].recv(1) == b""
    finally:
        for stranger in crowd:
            stranger.close()
        made.close()
