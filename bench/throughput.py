"""Throughput beside gloo: the same tensors between the same processes, in blocks that take turns.

Both are called as a user calls them, `dist.all_reduce(tensor, group=group)`, through the same code
of torch. A block's time is that of its slowest rank; the median block counts.
"""

from __future__ import annotations

import functools
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ranks import Process, join, run, stock_group
from tmover.comm.fabric import Fabric

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
ROUNDS = 5
_BLOCK_BYTES = 256 * MIB
_MOST_CALLS, _FEWEST_CALLS = 100, 2
_VOTES = 300
_TIME = struct.Struct("!d")
_WIDTH = 9

Call = Callable[[], Any]


class Point(NamedTuple):
    """One operation at one size: seconds per call. `bytes` is the larger of input and output."""

    op: str
    bytes: int
    world: int
    tmover_s: float
    gloo_s: float

    @property
    def ratio(self) -> float:
        """How many times the throughput of gloo."""
        return self.gloo_s / self.tmover_s


class Vote(NamedTuple):
    """Latencies of eight bytes to everybody: a vote, and gloo's all_reduce of as many."""

    world: int
    vote_us: float
    gloo_us: float


def measure(
    worlds: Sequence[int], sizes: tuple[int, ...], rounds: int
) -> tuple[list[Point], list[Vote]]:
    """Race both at every size; say how it goes."""
    points: list[Point] = []
    votes: list[Vote] = []
    for world in worlds:
        print(f"\nthroughput with {world} ranks, as a multiple of gloo's")
        print(f"{'':16}" + "".join(f"{_name(size):>{_WIDTH}}" for size in sizes), flush=True)
        raced, voted = run(functools.partial(_race, sizes=sizes, rounds=rounds), world)[0]
        points += raced
        votes.append(voted)
    return points, votes


def _name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


# --- in the ranks ---------------------------------------------------------------------------------


def _race(process: Process, *, sizes: tuple[int, ...], rounds: int) -> tuple[list[Point], Vote]:
    rank, world = process.number, process.total
    fabric = join(process, world)
    groups = {"tmover": dist.group.WORLD, "gloo": stock_group(process.store, rank, world)}
    points = []
    for op, make in _OPS.items():
        _say(rank, f"{op:16}")
        for size in sizes:
            tensors = [torch.empty(size // 4).fill_(0.0) for _ in range(2)]  # every page is there
            calls = {name: make(group, tensors) for name, group in groups.items()}
            count = min(_MOST_CALLS, max(_FEWEST_CALLS, _BLOCK_BYTES // size))
            times = _in_turns(fabric, calls, count, rounds)
            points.append(Point(op, size, world, times["tmover"], times["gloo"]))
            _say(rank, f"{points[-1].ratio:{_WIDTH}.2f}")
        _say(rank, "\n")
    return points, _vote(fabric, groups["gloo"], world, rounds)


def _vote(fabric: Fabric, gloo: Any, world: int, rounds: int) -> Vote:
    number = torch.zeros(1, dtype=torch.int64)
    calls = {
        "vote": lambda: fabric.exchange(bytes(8)),
        "gloo": lambda: dist.all_reduce(number, group=gloo),
    }
    times = _in_turns(fabric, calls, _VOTES, rounds)
    return Vote(world, times["vote"] * 1e6, times["gloo"] * 1e6)


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, end="", flush=True)


def _in_turns(fabric: Fabric, calls: dict[str, Call], count: int, rounds: int) -> dict[str, float]:
    """Return the median time of each, measured in blocks of `count` calls."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        _block(fabric, call, _FEWEST_CALLS)
    for number in range(rounds):
        order = list(calls) if number % 2 == 0 else list(reversed(calls))
        for name in order:
            times[name].append(_block(fabric, calls[name], count))
    return {name: statistics.median(values) for name, values in times.items()}


def _block(fabric: Fabric, call: Call, count: int) -> float:
    """Return the time of a call on the slowest rank."""
    fabric.exchange(b"")
    begin = time.perf_counter()
    for _ in range(count):
        call()
    took_s = (time.perf_counter() - begin) / count
    heard = fabric.exchange(_TIME.pack(took_s))
    return max(float(_TIME.unpack(each)[0]) for each in heard)


# --- the operations -------------------------------------------------------------------------------


def _all_reduce(group: Any, tensors: list[torch.Tensor]) -> Call:
    return lambda: dist.all_reduce(tensors[0], group=group)


def _reduce_scatter(group: Any, tensors: list[torch.Tensor]) -> Call:
    whole, part = tensors[0], _part(tensors[1])
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def _all_gather(group: Any, tensors: list[torch.Tensor]) -> Call:
    whole, part = tensors[0], _part(tensors[1])
    return lambda: dist.all_gather_into_tensor(whole, part, group=group)


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: tensor.numel() // dist.get_world_size()]


def _broadcast(group: Any, tensors: list[torch.Tensor]) -> Call:
    return lambda: dist.broadcast(tensors[0], src=0, group=group)


def _send_recv(group: Any, tensors: list[torch.Tensor]) -> Call:
    """Return a message between two neighbours, and one back."""
    rank, (there, back) = dist.get_rank(), tensors
    peer = rank ^ 1

    def begin() -> None:
        dist.send(there, dst=peer, group=group)
        dist.recv(back, src=peer, group=group)

    def answer() -> None:
        dist.recv(there, src=peer, group=group)
        dist.send(back, dst=peer, group=group)

    return begin if rank < peer else answer


_OPS: dict[str, Callable[[Any, list[torch.Tensor]], Call]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}
