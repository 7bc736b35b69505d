"""Who has a MUNGE credential, and what a credential is good for: a real munged, a real door."""

from __future__ import annotations

import asyncio
import getpass
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import zmq

from support.munged import NEEDS_MUNGED, munged
from tmover import wire
from tmover.controller.allowance import Allowance
from tmover.controller.audit import Audit
from tmover.controller.door import Door, Porter
from tmover.controller.introduction import payload
from tmover.controller.keyring import Keyring
from tmover.controller.keys import Keypair
from tmover.controller.munge import Munge, why_not
from tmover.errors import MungeError, Refused

pytestmark = NEEDS_MUNGED

T = TypeVar("T")
ME = getpass.getuser()


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    with munged() as path:
        yield path


def pair() -> Keypair:
    return Keypair(*zmq.curve_keypair())


SERVER, OWN = pair(), pair()


class Desk:
    """A porter whose clock the test sets."""

    def __init__(self, socket: str, *, serves: Callable[[str], bool] = lambda _: True) -> None:
        self.munge = Munge(socket)
        self.ring = Keyring({}, serves=serves)
        self.now = 0.0
        self.porter = Porter(
            server=SERVER.public, munge=self.munge, keyring=self.ring, now=lambda: self.now
        )

    def made(self, key: bytes = OWN.public, server: bytes = SERVER.public) -> str:
        return self.munge.encode(payload(server, key), reader=os.geteuid())

    def hear(self, credential: str, key: bytes = OWN.public) -> str:
        return asyncio.run(self.porter.hear(key, wire.Introduction(credential=credential)))

    def why_not(self, credential: str, key: bytes = OWN.public) -> str:
        with pytest.raises(Refused) as refused:
            self.hear(credential, key)
        return str(refused.value)


@pytest.fixture
def desk(socket: str) -> Desk:
    return Desk(socket)


# --- what a credential is good for ----------------------------------------------------------------


def test_a_key_is_known_as_whose_munge_says_it_is(desk: Desk) -> None:
    assert desk.hear(desk.made()) == ME
    assert desk.ring[OWN.public] == ME


def test_a_credential_is_good_once(desk: Desk) -> None:
    made = desk.made()
    desk.hear(made)

    assert desk.why_not(made) == "MUNGE: replayed credential"


@pytest.mark.parametrize("kind", ["another key", "another controller", "another purpose"])
def test_a_credential_is_good_for_one_key_one_controller_and_one_purpose(
    desk: Desk, kind: str
) -> None:
    made = {
        "another key": desk.made(key=pair().public),
        "another controller": desk.made(server=pair().public),
        "another purpose": desk.munge.encode(SERVER.public + OWN.public),
    }[kind]

    assert desk.why_not(made) == "the credential was made for another key, controller or purpose"
    assert OWN.public not in desk.ring


@pytest.mark.parametrize(
    "rubbish", ["", "x", "MUNGE:", "MUNGE:" + "A" * 400 + ":", "A" * 8000, "\0", "ü", "%s%n"]
)
def test_what_is_no_credential_is_refused(desk: Desk, rubbish: str) -> None:
    assert desk.why_not(rubbish)
    assert len(desk.ring) == 0


def test_a_credential_that_is_too_old_is_refused(desk: Desk, tmp_path: pathlib.Path) -> None:
    with munged() as other:
        foreign = Munge(other).encode(payload(SERVER.public, OWN.public))
    assert desk.why_not(foreign) == "MUNGE: invalid credential"


def test_nobody_but_the_controller_s_user_can_use_a_credential_up(socket: str) -> None:
    made = Munge(socket).encode(b"x", reader=os.geteuid() + 1)

    with pytest.raises(MungeError, match="unauthorized credential"):
        Munge(socket).decode(made)


def test_a_user_who_is_not_served_is_told_what_to_do(socket: str) -> None:
    desk = Desk(socket, serves=lambda user: user == "bob")

    said = desk.why_not(desk.made())
    assert said == f"its administrator has to put {ME} among its `users`"


def test_a_key_that_was_refused_is_not_heard_again_at_once(desk: Desk) -> None:
    desk.why_not("MUNGE:x:")

    assert "was refused just now" in desk.why_not(desk.made())
    desk.now = 6.0
    assert desk.hear(desk.made()) == ME


def test_without_munged_it_says_so() -> None:
    assert "/nowhere" in why_not("/nowhere/socket")


def test_so_many_at_once_and_then_so_many_a_second() -> None:
    allowance = Allowance(10.0, 3.0, now=0.0)

    assert [allowance.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [allowance.take(0.11) for _ in range(2)] == [True, False]
    waits = [allowance.wait_s(0.11) for _ in range(3)]
    assert waits == sorted(waits)
    assert waits[-1] > 0.2


# --- the door -------------------------------------------------------------------------------------


def at_the_door(
    desk: Desk, talk: Callable[[Door, Callable[[bytes | None, Keypair], zmq.Socket[bytes]]], T]
) -> T:
    """Have a thread talk to a door; its connections are made by `connect(server key, own key)`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers: list[zmq.Socket[bytes]] = []

    async def serve() -> T:
        door = Door("tcp://127.0.0.1:0", server=SERVER, porter=desk.porter, audit=Audit())

        def connect(server: bytes | None, own: Keypair) -> zmq.Socket[bytes]:
            peer = context.socket(zmq.DEALER)
            peers.append(peer)
            if server is not None:
                peer.curve_serverkey = server
                peer.curve_publickey, peer.curve_secretkey = own
            peer.connect(door.bound)
            return peer

        work = asyncio.ensure_future(door.run())
        try:
            return await asyncio.to_thread(talk, door, connect)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            door.close()

    try:
        return asyncio.run(asyncio.wait_for(serve(), 60))
    finally:
        for peer in peers:
            peer.close(linger=0)
        context.term()


Connect = Callable[["bytes | None", Keypair], "zmq.Socket[bytes]"]


def introduce(peer: zmq.Socket[bytes], credential: str) -> wire.FromDoor:
    peer.send_multipart(wire.encode(wire.Introduction(credential=credential)))
    assert peer.poll(20_000), "no answer"
    return wire.decode_at_door(peer.recv_multipart())


def test_the_key_that_counts_is_the_one_that_the_connection_proved(desk: Desk) -> None:
    thief = pair()

    def talk(door: Door, connect: Connect) -> list[wire.FromDoor]:
        del door
        stolen = introduce(connect(SERVER.public, thief), desk.made())
        return [stolen, introduce(connect(SERVER.public, OWN), desk.made())]

    stolen, own = at_the_door(desk, talk)

    assert isinstance(stolen, wire.RefusedReply)
    assert own == wire.Introduced(user=ME)
    assert (thief.public in desk.ring, OWN.public in desk.ring) == (False, True)


@pytest.mark.parametrize("kind", ["rubbish", "big", "request", "plain"])
def test_whatever_is_said_the_door_stays_open(desk: Desk, kind: str) -> None:
    said = {
        "rubbish": [wire.VERSION, os.urandom(3000)],
        "big": [wire.VERSION, b"x" * 10_000_000],
        "request": wire.encode(wire.CancelRequest(reason="envy")),
        "plain": [b"GET / HTTP/1.1"],
    }[kind]

    def talk(door: Door, connect: Connect) -> wire.FromDoor:
        del door
        for _ in range(20):
            connect(None if kind == "plain" else SERVER.public, pair()).send_multipart(said)
        return introduce(connect(SERVER.public, OWN), desk.made())

    assert at_the_door(desk, talk) == wire.Introduced(user=ME)


def test_one_who_floods_the_door_does_not_keep_others_out(desk: Desk) -> None:
    flood = wire.encode(wire.Introduction(credential="MUNGE:" + "A" * 3000 + ":"))

    def talk(door: Door, connect: Connect) -> tuple[wire.FromDoor, float]:
        del door
        crowd = [connect(SERVER.public, pair()) for _ in range(8)]
        for _ in range(500):
            for peer in crowd:
                with_room = peer.poll(0, zmq.POLLOUT)
                if with_room:
                    peer.send_multipart(flood, zmq.DONTWAIT)
        began = time.monotonic()
        return introduce(connect(SERVER.public, OWN), desk.made()), time.monotonic() - began

    answer, took_s = at_the_door(desk, talk)

    assert answer == wire.Introduced(user=ME)
    assert took_s < 20
