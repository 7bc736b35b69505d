"""The worker's line to its agent. What ends it must be heard of: orders come over nothing else."""

from __future__ import annotations

import pathlib
import queue

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
