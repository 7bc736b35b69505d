"""How fast state is handed over, as a ratio to copying the same bytes over the same socket.

    python bench/handoff.py [--mib 512] [--rounds 5] [--json FILE]

Two processes on this machine, one thread each, taking turns within each round: a plain copy
(`sendall`, `recv_into` the target), the same with every chunk hashed on both sides, and the
hand-off of a model with AdamW's state: hashed, verified in a bounded buffer, then copied into live
tensors. Then replicas that send together (`sources.py`), and a job of two nodes whose ranks have no
replicas, with and without copies (`copying.py`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import socket
import statistics
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import xxhash

import copying
import sources
from states import MIB, State
from tmover.state.transfer import receive_state, send_state

CHUNK = MIB
OUT = pathlib.Path(__file__).parent / "out" / "handoff.json"
_SOCKET_BYTES = 4 * MIB
_CPU = struct.Struct("<d")


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


class Taken(NamedTuple):
    """What one way took in one round."""

    wall_s: float
    cpu_s: float
    """Of both processes: what the ratio is on a machine that has other things to do."""
    memory: float
    """The sender's most memory meanwhile, by what it had before."""


def receiver(port: int, mib: int, rounds: int) -> None:
    """Receive whatever the other process sends, round after round."""
    torch.set_num_threads(1)
    state = State(mib, 0.0)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        _tune(sock)
        for _ in range(rounds):
            for _, receive in WAYS.values():
                sock.sendall(b"g")
                begin = time.process_time()
                receive(sock, state)
                sock.sendall(_CPU.pack(time.process_time() - begin))


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)


def sender(sock: socket.socket, state: State, send: Side) -> Taken:
    """Send once the receiver is there."""
    sock.settimeout(None)
    sock.recv(1)
    before = _kib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    begin, cpu = time.perf_counter(), time.process_time()
    send(sock, state)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    memory = _kib("VmHWM") / before
    sock.settimeout(None)
    (theirs,) = _CPU.unpack(sock.recv(_CPU.size, socket.MSG_WAITALL))
    return Taken(wall_s, cpu_s + theirs, memory)


def _kib(what: str) -> int:
    """Return a figure of this process's memory, in KiB."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1])
    raise LookupError(what)


def measure(mib: int, rounds: int) -> dict[str, list[Taken]]:
    """Return what each way took, by round."""
    torch.set_num_threads(1)
    state = State(mib, 1.0)
    taken: dict[str, list[Taken]] = {name: [] for name in WAYS}
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
                    taken[name].append(sender(sock, state, send))
        other.join()
    return taken


def main() -> None:
    """Measure, print a table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="one more is made and not counted")
    parser.add_argument("--model", default="50m", help="what is trained with copies")
    parser.add_argument("--json", type=pathlib.Path, default=OUT, help="where the figures go")
    args = parser.parse_args()
    taken = measure(args.mib, args.rounds + 1)
    ratios = {name: _ratios(taken, name) for name in WAYS}
    for name in WAYS:
        wall_s = statistics.median(each.wall_s for each in taken[name][1:])
        ratio = ", ".join(f"{value:.2f} of {base}" for base, value in ratios[name].items())
        print(f"{name:16}{args.mib / 1024 / wall_s:6.2f} GiB/s   {ratio}")
    memory = statistics.median(each.memory for each in taken["hand-off"][1:])
    print(f"the sender's most memory meanwhile, by what it had: {memory:.4f}")
    sooner = sources.measure(args.mib // 2, args.rounds)
    for count, times in list(sooner.items())[1:]:
        print(f"from {count} sources of the same speed: {times:.2f} times as soon as from one")
    cost = copying.measure(args.model)
    print(
        f"a step with copies after each, by one without ({cost.step_s * 1e3:.0f} ms): "
        f"{cost.step_overhead:.3f}; copies of {cost.host_bytes_per_rank / MIB:.0f} MiB per rank"
    )
    report = {
        "ratio_to_raw_socket": ratios["hand-off"]["copy with hash"],
        "ratio_to_plain_socket": ratios["hand-off"]["plain copy"],
        "stayer_rss_ratio": memory,
        "sooner_from_sources": sooner,
        "peer_copy": cost._asdict(),
    }
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2))
    print(f"written to {args.json}")


def _ratios(taken: dict[str, list[Taken]], name: str) -> dict[str, float]:
    """Return the median speed relative to the plainer ways, by wall clock and by CPU time."""
    found = {}
    for base in ("plain copy", "copy with hash"):
        rounds = list(zip(taken[base][1:], taken[name][1:], strict=True))
        found[base] = statistics.median(b.wall_s / t.wall_s for b, t in rounds)
        found[f"{base} (CPU)"] = statistics.median(b.cpu_s / t.cpu_s for b, t in rounds)
    return found


if __name__ == "__main__":
    main()
