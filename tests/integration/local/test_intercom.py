"""The agent's line to its workers, with sockets in the workers' place."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import zmq

from tmover import wire
from tmover.agent.intercom import Intercom, new_address
from tmover.core.events import NO_STEP, Finished
from tmover.core.orders import Revoke, Stop, Welcome
from tmover.core.progress import Progress

AGENT = "node1-aa"
GREETING = wire.Greeting(job="7", agent=AGENT, boot="b", secret=b"s")
WELCOME = Welcome(job="7", agent=AGENT, launch=1, slot=0, nnodes=1, nproc=2, sandbox=False)
REVOKE = Revoke(job="7", agent=AGENT, epoch=1, reason="r")
STOP = Stop(job="7", agent=AGENT, code=0, reason="done")
WAIT_MS = 30_000

Socket = zmq.Socket[bytes]


class Office:
    """An intercom, and a way to connect to it."""

    def __init__(self) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.address = new_address()
        self.intercom = Intercom(self.context, self.address, agent=AGENT, nproc=2)
        self._sockets: list[Socket] = []

    def connect(self) -> Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.connect(self.address)
        self._sockets.append(socket)
        return socket

    def hear(self, messages: int) -> list[wire.FromWorker]:
        """Return what the intercom passes on of so many messages, dropped ones included."""
        heard: list[wire.FromWorker] = []
        for _ in range(messages):
            assert self.intercom.socket.poll(WAIT_MS)
            heard += self.intercom.receive_one()
        return heard

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self.intercom.close()
        self.context.term()


@pytest.fixture
def office() -> Iterator[Office]:
    made = Office()
    yield made
    made.close()


def say(socket: Socket, *messages: wire.FromWorker) -> None:
    for message in messages:
        socket.send_multipart(wire.encode(message))


def ask(socket: Socket) -> wire.FromController:
    assert socket.poll(WAIT_MS)
    return wire.decode_order(socket.recv_multipart())


def hello(local_rank: int) -> wire.Hello:
    return wire.Hello(local_rank=local_rank, pid=os.getpid())


def finished(local_rank: int) -> Finished:
    return Finished(job="7", worker=f"{AGENT}/{local_rank}", step=3)


def test_a_worker_is_introduced_when_it_says_hello(office: Office) -> None:
    office.intercom.introduce(GREETING, WELCOME)
    worker = office.connect()

    say(worker, hello(0))

    assert office.hear(1) == [hello(0)]
    assert [ask(worker), ask(worker)] == [GREETING, WELCOME]


def test_a_worker_that_was_early_is_introduced_when_it_is_known_who_it_is(office: Office) -> None:
    worker = office.connect()
    say(worker, hello(1))
    office.hear(1)

    office.intercom.introduce(GREETING, WELCOME)

    assert [ask(worker), ask(worker)] == [GREETING, WELCOME]


def test_orders_reach_those_that_are_there_and_those_that_come_later(office: Office) -> None:
    first, second = office.connect(), office.connect()
    say(first, hello(0))
    office.hear(1)

    office.intercom.relay(REVOKE)
    office.intercom.relay(STOP)
    say(second, hello(1))
    office.hear(1)

    assert [ask(first), ask(first)] == [ask(second), ask(second)] == [REVOKE, STOP]


def test_where_workers_listen_is_known_when_all_have_said_so(office: Office) -> None:
    first, second = office.connect(), office.connect()
    say(first, hello(0), wire.Endpoint(local_rank=0, endpoint="a:1"))
    assert office.hear(2) == [hello(0)]
    assert office.intercom.endpoints is None

    say(second, hello(1), wire.Endpoint(local_rank=1, endpoint="a:2"))

    assert office.hear(2) == [hello(1)]
    assert office.intercom.endpoints == ("a:1", "a:2")


def test_the_last_step_of_each_worker_is_kept(office: Office) -> None:
    first, second = office.connect(), office.connect()
    assert (office.intercom.steps, office.intercom.phase) == ((NO_STEP, NO_STEP), "starting")
    say(first, hello(0), wire.Pulse(local_rank=0, step=4, phase="training"))
    office.hear(2)
    say(second, hello(1), wire.Pulse(local_rank=1, step=3, phase="waiting"))
    office.hear(2)

    assert (office.intercom.steps, office.intercom.phase) == ((4, 3), "waiting")


def test_how_each_worker_gets_on_is_kept_and_is_no_step(office: Office) -> None:
    said = Progress(rank=5, step=4, awaits=(2,), waited={2: 0.5}, steps=3, median_s=0.1)
    worker = office.connect()

    say(worker, hello(1), wire.Pace(local_rank=1, progress=said))
    office.hear(2)

    assert office.intercom.progress == (None, said)
    assert office.intercom.pulses == {}


def test_events_are_passed_on(office: Office) -> None:
    worker = office.connect()

    say(worker, hello(1), finished(1))

    assert office.hear(2) == [hello(1), finished(1)]


@pytest.mark.parametrize(
    "said",
    [
        [finished(0)],
        [wire.Pulse(local_rank=0, step=4)],
        [hello(2)],
        [hello(-1)],
    ],
    ids=["no hello", "a pulse without hello", "a rank too high", "a rank below 0"],
)
def test_a_stranger_is_not_heard(office: Office, said: list[wire.FromWorker]) -> None:
    say(office.connect(), *said)

    assert office.hear(len(said)) == []
    assert office.intercom.pulses == {}


def test_nobody_speaks_for_another(office: Office) -> None:
    worker = office.connect()

    say(worker, hello(1), finished(0))

    assert office.hear(2) == [hello(1)]


def test_a_place_is_not_taken_twice(office: Office) -> None:
    first, second = office.connect(), office.connect()
    say(first, hello(0))
    office.hear(1)

    say(second, hello(0), finished(0))

    assert office.hear(2) == []


def test_what_cannot_be_read_harms_nobody(office: Office) -> None:
    stranger, worker = office.connect(), office.connect()
    stranger.send_multipart([b"tmover/0", b"x"])
    stranger.send_multipart([wire.VERSION, b"\xff"])
    stranger.send(b"")
    assert office.hear(3) == []

    say(worker, hello(0))

    assert office.hear(1) == [hello(0)]


def test_an_address_is_never_the_same() -> None:
    assert len({new_address() for _ in range(100)}) == 100


def test_workers_are_told_where_all_of_them_listen_once_they_do(office: Office) -> None:
    office.intercom.introduce(GREETING, WELCOME)
    first, second = office.connect(), office.connect()
    say(first, hello(0), wire.Endpoint(local_rank=0, endpoint="here:1"))
    office.hear(2)
    assert [type(ask(first)) for _ in range(2)] == [wire.Greeting, Welcome]
    assert not first.poll(0)

    say(second, hello(1), wire.Endpoint(local_rank=1, endpoint="here:2"))
    office.hear(2)

    assert ask(first) == wire.Siblings(job="7", endpoints=("here:1", "here:2"))
    assert [type(ask(second)) for _ in range(3)] == [wire.Greeting, Welcome, wire.Siblings]
