"""How much sooner a state has come that several replicas send, each as fast as its network is.

Every source is a process of its own. The kernel holds back what each sends (SO_MAX_PACING_RATE), as
a network card of that speed would; so it is the sources that are measured and not this machine.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection

import torch

from states import MIB, State
from tmover.state.helping import send_share
from tmover.state.messages import Purpose
from tmover.state.transfer import receive_state, send_state

SPEED = 200 * MIB
"""Bytes per second that each source sends."""
SOURCES = (1, 2, 4)
_PACING = getattr(socket, "SO_MAX_PACING_RATE", 47)
_PURPOSE = Purpose("bench", 1, 1)
_TIMEOUT_S = 120.0


def _source(number: int, mib: int, port: int, orders: Connection) -> None:
    """Send this source's part whenever told how many there are, until told 0."""
    torch.set_num_threads(1)
    tracked = State(mib, 1.0).tracked
    orders.send("ready")
    while available := orders.recv():
        if number >= available:
            continue

        def connect() -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", port + number))
            sock.setsockopt(socket.SOL_SOCKET, _PACING, SPEED)
            return sock

        if number:
            send_share(
                connect, _PURPOSE, tracked=tracked, source=number, available=available,
                peer="receiver", timeout_s=_TIMEOUT_S,
            )  # fmt: skip
        else:
            with connect() as sock:
                send_state(
                    sock, job=_PURPOSE.job, epoch=_PURPOSE.epoch, step=_PURPOSE.step,
                    tracked=tracked, record=b"", available=available, timeout_s=_TIMEOUT_S,
                )  # fmt: skip


class Receiver:
    """Listens for each source on a port of its own."""

    def __init__(self, mib: int) -> None:
        self._state = State(mib, 0.0)
        self.listeners = _neighbouring(max(SOURCES))

    @property
    def port(self) -> int:
        """The first source's; the others follow."""
        port: int = self.listeners[0].getsockname()[1]
        return port

    def receive(self, available: int) -> float:
        """Return how long it took until all had come, in seconds."""
        sock, _ = self.listeners[0].accept()
        begin = time.perf_counter()
        others = {
            f"source {number}": lambda listener=listener: listener.accept()[0]
            for number, listener in enumerate(self.listeners[1:available], start=1)
        }
        with sock:
            receive_state(
                sock, job=_PURPOSE.job, epoch=_PURPOSE.epoch, tracked=self._state.tracked,
                others=others, timeout_s=_TIMEOUT_S,
            )  # fmt: skip
        return time.perf_counter() - begin


def _neighbouring(count: int) -> list[socket.socket]:
    """Return listeners on ports that follow each other."""
    while True:
        found = [socket.create_server(("127.0.0.1", 0))]
        first = found[0].getsockname()[1]
        try:
            found += [
                socket.create_server(("127.0.0.1", first + number)) for number in range(1, count)
            ]
        except OSError:
            for listener in found:
                listener.close()
        else:
            return found


def measure(mib: int, rounds: int) -> dict[int, float]:
    """Return how many times as soon as from one source it has come, by how many there are."""
    context = multiprocessing.get_context("spawn")
    receiver = Receiver(mib)
    pipes = [context.Pipe() for _ in range(max(SOURCES))]
    processes = [
        context.Process(target=_source, args=(number, mib, receiver.port, far), daemon=True)
        for number, (_, far) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for near, _ in pipes:
        near.recv()
    taken: dict[int, list[float]] = {count: [] for count in SOURCES}
    for _ in range(rounds):
        for count in SOURCES:
            for near, _ in pipes:
                near.send(count)
            taken[count].append(receiver.receive(count))
    for near, _ in pipes:
        near.send(0)
    for process in processes:
        process.join()
    return {
        count: statistics.median(a / b for a, b in zip(taken[1], taken[count], strict=True))
        for count in SOURCES
    }
