"""The worker's line to its agent. What ends it must be heard of: orders come over nothing else."""

from __future__ import annotations

import pathlib
import queue
from collections.abc import Callable, Iterator

import pytest
import zmq

from tmover import wire
from tmover.core.orders import Done
from tmover.worker.control import Control

SOON_MS = 10_000


def test_an_order_that_cannot_be_carried_out_ends_the_line_loudly(tmp_path: pathlib.Path) -> None:
    def carry_out(_order: wire.FromController) -> None:
        msg = "a fault of ours"
        raise KeyError(msg)

    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    context = zmq.Context()
    agent = context.socket(zmq.ROUTER)
    agent.linger = 0
    address = f"ipc://{tmp_path}/agent"
    agent.bind(address)
    control = Control(
        address,
        hello=wire.Hello(local_rank=0, pid=1),
        on_message=carry_out,
        on_failure=failures.put,
    )
    try:
        control.start()
        assert agent.poll(SOON_MS)
        worker, *_ = agent.recv_multipart()
        order = Done(job="1", agent="a", epoch=1)
        agent.send_multipart([worker, *wire.encode(order)])

        assert isinstance(failures.get(timeout=SOON_MS / 1000), KeyError)
        control._thread.join(SOON_MS / 1000)  # closing what has ended by itself leaves nothing open
    finally:
        control.close()
        control.close()
        agent.close()
        context.term()


@pytest.fixture
def line(tmp_path: pathlib.Path) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """An agent's socket, and where workers find it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    agent = context.socket(zmq.ROUTER)
    agent.linger = 0
    address = f"ipc://{tmp_path}/agent"
    agent.bind(address)
    yield agent, address
    agent.close()
    context.term()


def heard(agent: zmq.Socket[bytes]) -> wire.FromWorker:
    assert agent.poll(SOON_MS)
    _, *frames = agent.recv_multipart()
    return wire.decode_worker(frames)


def control(address: str, look: Callable[[], wire.FromWorker | None]) -> Control:
    return Control(
        address,
        hello=HELLO,
        on_message=lambda _: None,
        on_failure=lambda _: None,
        on_look=look,
        look_s=0.001,
    )


HELLO = wire.Hello(local_rank=0, pid=1)


def test_what_is_seen_of_a_worker_is_said_whatever_its_other_threads_do(
    line: tuple[zmq.Socket[bytes], str],
) -> None:
    agent, address = line
    said = iter([None, wire.Pulse(local_rank=0, step=1), wire.Pulse(local_rank=0, step=2)])
    made = control(address, lambda: next(said, None))
    made.start()

    try:
        assert [heard(agent) for _ in range(3)] == [
            HELLO,
            wire.Pulse(local_rank=0, step=1),
            wire.Pulse(local_rank=0, step=2),
        ]
    finally:
        made.close()


def test_a_look_that_fails_costs_the_looking_alone(line: tuple[zmq.Socket[bytes], str]) -> None:
    looks = []

    def look() -> None:
        looks.append(1)
        msg = "a fault of ours"
        raise KeyError(msg)

    agent, address = line
    made = control(address, look)
    made.start()

    try:
        assert heard(agent) == HELLO
        made.send(wire.Pulse(local_rank=0, step=7))
        assert heard(agent) == wire.Pulse(local_rank=0, step=7)
    finally:
        made.close()
    assert len(looks) <= 1


def test_of_what_is_noted_the_last_is_said_and_before_what_is_sent_later(
    line: tuple[zmq.Socket[bytes], str],
) -> None:
    agent, address = line
    made = control(address, lambda: None)
    for step in (1, 2):
        made.note(wire.Pulse(local_rank=0, step=step))
    made.send(wire.Pulse(local_rank=0, step=3))
    made.start()

    try:
        assert [heard(agent) for _ in range(3)] == [
            HELLO,
            wire.Pulse(local_rank=0, step=2),
            wire.Pulse(local_rank=0, step=3),
        ]
        made.note(wire.Pulse(local_rank=0, step=4))
        assert heard(agent) == wire.Pulse(local_rank=0, step=4)
    finally:
        made.close()
