from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.comm.handshake import MAGIC, Acceptor, Dialer, Hello
from tmover.errors import LinkError, ProtocolError

SECRET = b"k" * 32
HELLO = Hello(job="7", epoch=3, group="0", lane="data", sender="b/0", receiver="a/0")


def talk(dialer: Dialer, acceptor: Acceptor, *, step: int = 1 << 10) -> None:
    """Carry bytes to and fro, `step` at a time, until somebody is through."""
    to_acceptor, to_dialer = dialer.start(), b""
    while not dialer.done:
        while to_acceptor:
            count = min(step, acceptor.needs)
            piece, to_acceptor = to_acceptor[:count], to_acceptor[count:]
            to_dialer += acceptor.feed(piece)
        needs = dialer.needs
        assert len(to_dialer) >= needs
        piece, to_dialer = to_dialer[:needs], to_dialer[needs:]
        to_acceptor += dialer.feed(piece)


def welcome(_hello: Hello) -> str:
    return ""


@pytest.mark.parametrize("step", [1, 3, 1 << 10])
def test_both_ends_agree_on_what_the_link_is_for(step: int) -> None:
    acceptor = Acceptor(SECRET, welcome)

    talk(Dialer(HELLO, SECRET), acceptor, step=step)

    assert acceptor.hello is not None
    said = {name: getattr(acceptor.hello, name) for name in HELLO.__struct_fields__}
    assert said | {"nonce": b""} == {n: getattr(HELLO, n) for n in HELLO.__struct_fields__}
    assert len(acceptor.hello.nonce) == 32


def test_a_dialer_without_the_secret_is_refused() -> None:
    dialer, acceptor = Dialer(HELLO, b"other" * 8), Acceptor(SECRET, welcome)

    acceptor.feed(dialer.start())
    reply = acceptor.feed(b"\0" * 32)

    assert b"wrong secret" in reply
    assert acceptor.hello is None


def test_a_listener_without_the_secret_is_found_out() -> None:
    with pytest.raises(LinkError, match="a/0 does not hold this job's secret") as caught:
        talk(Dialer(HELLO, SECRET), Acceptor(b"other" * 8, welcome))

    assert caught.value.peers == ("a/0",)


def test_the_reason_of_a_refusal_reaches_who_holds_the_secret() -> None:
    acceptor = Acceptor(SECRET, lambda hello: f"epoch {hello.epoch} is over")

    with pytest.raises(LinkError, match="a/0 refused the link: epoch 3 is over"):
        talk(Dialer(HELLO, SECRET), acceptor)

    assert acceptor.hello is None


def test_nobody_is_told_why_before_he_has_proven_himself() -> None:
    asked = []

    def refuse(hello: Hello) -> str:
        asked.append(hello)
        return "no"

    acceptor = Acceptor(SECRET, refuse)

    acceptor.feed(Dialer(HELLO, SECRET).start())
    acceptor.feed(b"\0" * 32)

    assert asked == []


def test_a_proof_is_good_for_one_connection_only() -> None:
    dialer, first, second = Dialer(HELLO, SECRET), *(Acceptor(SECRET, welcome) for _ in "12")
    hello = dialer.start()
    proof = dialer.feed(first.feed(hello))

    second.feed(hello)
    second.feed(proof)

    assert second.refused == "wrong secret"


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_waited_out_or_refused(data: bytes) -> None:
    acceptor = Acceptor(SECRET, welcome)

    try:
        for byte in data:
            acceptor.feed(bytes([byte]))
    except ProtocolError:
        return

    assert acceptor.hello is None
    assert MAGIC.startswith(data[: len(MAGIC)])


def test_an_endless_hello_is_refused() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        Acceptor(SECRET, welcome).feed(MAGIC + b"\xff\xff")


@pytest.mark.parametrize("said", [b"\x81\xa1x" + b"\x91" * 4000, b"\x81\xa3job\xa1\xff"])
def test_a_hello_that_cannot_be_decoded_is_refused(said: bytes) -> None:
    """Arrays nested deeper than the decoder goes, and text that is no UTF-8."""
    with pytest.raises(ProtocolError, match="hello cannot be read"):
        Acceptor(SECRET, welcome).feed(MAGIC + struct.pack("<H", len(said)) + said)
