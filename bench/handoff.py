"""How fast state is handed over, as a ratio to copying the same bytes over the same socket.

    python bench/handoff.py [--mib 512] [--rounds 5]

Two processes on this machine, one thread each, taking turns within each round: a plain copy
(`sendall`, `recv_into` the target), the same with every chunk hashed on both sides, and the
hand-off of a model with AdamW's state: hashed, verified in a bounded buffer, then copied into live
tensors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable

import torch
import xxhash
from torch import nn

from tmover.state.capture import Tracked
from tmover.state.memory import view
from tmover.state.transfer import receive_state, send_state

MIB = 1 << 20
CHUNK = MIB
_SOCKET_BYTES = 4 * MIB


class State:
    """A model of many sizes of tensors, its optimizer, and one flat tensor of as many bytes."""

    def __init__(self, mib: int, fill: float) -> None:
        sizes = [4 * MIB, MIB, 256 << 10, 4096, 1024, 64]
        module = nn.Module()
        left, index = mib * MIB // 4 // 3, 0
        while left > 0:
            size = min(left, sizes[index % len(sizes)])
            module.register_parameter(f"p{index}", nn.Parameter(torch.full((size,), fill)))
            left, index = left - size, index + 1
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self.tracked = Tracked()
        self.tracked.track("model", module)
        self.tracked.track("optimizer", optimizer)
        self.flat = view(torch.full((mib * MIB // 4,), fill))


def plain_send(sock: socket.socket, state: State) -> None:
    for start in range(0, len(state.flat), CHUNK):
        sock.sendall(state.flat[start : start + CHUNK])
    sock.recv(1)


def plain_receive(sock: socket.socket, state: State) -> None:
    _fill(sock, state.flat)
    sock.sendall(b"k")


def hashed_send(sock: socket.socket, state: State) -> None:
    for start in range(0, len(state.flat), CHUNK):
        chunk = state.flat[start : start + CHUNK]
        sock.sendall(xxhash.xxh3_128_digest(chunk))
        sock.sendall(chunk)
    sock.recv(1)


def hashed_receive(sock: socket.socket, state: State) -> None:
    digest = memoryview(bytearray(16))
    for start in range(0, len(state.flat), CHUNK):
        chunk = state.flat[start : start + CHUNK]
        _fill(sock, digest)
        _fill(sock, chunk)
        assert xxhash.xxh3_128_digest(chunk) == digest
    sock.sendall(b"k")


def handoff_send(sock: socket.socket, state: State) -> None:
    send_state(sock, job="bench", epoch=1, step=1, tracked=state.tracked, record=b"")


def handoff_receive(sock: socket.socket, state: State) -> None:
    receive_state(sock, job="bench", epoch=1, tracked=state.tracked)
    sock.settimeout(None)


def _fill(sock: socket.socket, into: memoryview) -> None:
    while into:
        into = into[sock.recv_into(into) :]


Side = Callable[[socket.socket, State], None]
WAYS: dict[str, tuple[Side, Side]] = {
    "plain copy": (plain_send, plain_receive),
    "copy with hash": (hashed_send, hashed_receive),
    "hand-off": (handoff_send, handoff_receive),
}


def receiver(port: int, mib: int, rounds: int) -> None:
    """Receive whatever the other process sends, round after round."""
    torch.set_num_threads(1)
    state = State(mib, 0.0)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        _tune(sock)
        for _ in range(rounds):
            for _, receive in WAYS.values():
                sock.sendall(b"g")
                receive(sock, state)


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)


def measure(mib: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds each way took, by round."""
    torch.set_num_threads(1)
    state = State(mib, 1.0)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        other = multiprocessing.get_context("spawn").Process(
            target=receiver, args=(port, mib, rounds)
        )
        other.start()
        sock, _ = listener.accept()
        with sock:
            _tune(sock)
            for _ in range(rounds):
                for name, (send, _) in WAYS.items():
                    sock.settimeout(None)
                    sock.recv(1)
                    begin = time.perf_counter()
                    send(sock, state)
                    seconds[name].append(time.perf_counter() - begin)
        other.join()
    return seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="the first one is not counted")
    parser.add_argument("--json", action="store_true", help="print the medians as JSON")
    args = parser.parse_args()
    seconds = measure(args.mib, args.rounds + 1)
    ratios = {
        name: [a / b for a, b in zip(seconds["plain copy"][1:], taken[1:], strict=True)]
        for name, taken in seconds.items()
    }
    if args.json:
        json.dump({name: statistics.median(values) for name, values in ratios.items()}, sys.stdout)
        return
    for name, taken in seconds.items():
        median = statistics.median(taken[1:])
        speed, ratio = args.mib / 1024 / median, statistics.median(ratios[name])
        sys.stdout.write(f"{name:16}{median:8.3f} s {speed:6.2f} GiB/s {ratio:6.2f} of plain\n")


if __name__ == "__main__":
    main()
