"""Who speaks over a connection is known by the key that it was made with."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Awaitable, Callable

import pytest
import zmq

from tmover import wire
from tmover.controller import keys
from tmover.controller.gate import Gate
from tmover.controller.keys import Keypair

ASK = wire.StatusRequest()


class Hall:
    """A gate that is open for ann, for bob and for who runs the controller, and sockets to it."""

    def __init__(self, state: pathlib.Path) -> None:
        self._server, self.client = keys.make(state)
        self.ann, self.bob = pair(), pair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []

    def open(self, talk: Callable[[Gate], Awaitable[None]]) -> None:
        async def hear() -> None:
            users = {self.ann.public: "ann", self.bob.public: "bob"}
            gate = Gate("tcp://127.0.0.1:0", server=self._server, client=self.client, users=users)
            try:
                await talk(gate)
            finally:
                gate.close()

        try:
            asyncio.run(asyncio.wait_for(hear(), 30))
        finally:
            for peer in self._peers:
                peer.close(linger=0)
            self._context.term()

    def say(self, gate: Gate, own: Keypair, *messages: list[bytes]) -> None:
        """Send over a connection made with a key of one's own."""
        peer = self._context.socket(zmq.DEALER)
        self._peers.append(peer)
        peer.curve_serverkey = self._server.public
        peer.curve_publickey, peer.curve_secretkey = own
        peer.connect(gate.bound)
        for message in messages:
            peer.send_multipart(message)


@pytest.fixture
def hall(tmp_path: pathlib.Path) -> Hall:
    return Hall(tmp_path)


def pair() -> Keypair:
    return Keypair(*zmq.curve_keypair())


def test_two_users_and_who_runs_the_controller_are_told_apart(hall: Hall) -> None:
    heard: list[tuple[wire.ToController, str]] = []

    async def talk(gate: Gate) -> None:
        for own in (hall.ann, hall.bob, hall.client):
            hall.say(gate, own, wire.encode(ASK))
            heard.append((await gate.receive())[1:])

    hall.open(talk)

    assert heard == [(ASK, "ann"), (ASK, "bob"), (ASK, "")]


def test_a_key_that_is_nobody_s_is_not_let_in(hall: Hall, caplog: pytest.LogCaptureFixture) -> None:
    stranger = pair()
    heard: list[tuple[wire.ToController, str]] = []

    async def talk(gate: Gate) -> None:
        hall.say(gate, stranger, wire.encode(wire.StatusRequest(job="7")))
        first = asyncio.ensure_future(gate.receive())
        while "refused a connection" not in caplog.text:
            await asyncio.sleep(0.005)
        hall.say(gate, hall.ann, wire.encode(ASK))
        heard.append((await first)[1:])

    hall.open(talk)

    assert heard == [(ASK, "ann")]
    assert stranger.public.decode() in caplog.text
    assert stranger.secret.decode() not in caplog.text


def test_a_user_s_message_that_cannot_be_read_harms_nobody(
    hall: Hall, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[tuple[wire.ToController, str]] = []

    async def talk(gate: Gate) -> None:
        hall.say(gate, hall.ann, [wire.VERSION, b"rubbish"], wire.encode(ASK))
        heard.append((await gate.receive())[1:])

    hall.open(talk)

    assert heard == [(ASK, "ann")]
    assert "refused a message: unreadable message" in caplog.text
