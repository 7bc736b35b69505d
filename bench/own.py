"""What it costs a step to know how long its rank has waited: with the counter, and without it.

    OMP_NUM_THREADS=1 python bench/own.py

Two ranks do steps of some 5 ms that wait for each other 8 times, in blocks with and without by
turns. The median of the rounds' ratios is below; a step has so few waits that it is within what
two equal blocks differ by. So the counter's own time is measured, too: what one wait costs more, so
many of them, by the step. On 2 idle cores, 2026-12-01, torch 2.13.0:

    a step 6.0 ms, 8 waits; with / without, by turns: 1.0008, 1.0000
    the counter by itself: 0.0421% of a step of 5 ms
"""

from __future__ import annotations

import contextlib
import select
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import distributed as dist

import ranks
from tmover.comm.idle import IDLE, Idle
from tmover.comm.waiting import Waiting
from tmover.worker.own import Own

ROUNDS, STEPS, WAITS = 41, 40, 8
STEP_S = 0.005
_BATCHES, _CALLS = 101, 200


class Cost(NamedTuple):
    """What was measured on one rank."""

    ratio: float
    """Median over the rounds of the median step with the counter by that without."""
    step_s: float
    """The median step without."""
    counter_s: float
    """What the counter takes of a step, by itself."""


def main() -> int:
    costs = ranks.run(_measure, 2)
    step_s = max(cost.step_s for cost in costs)
    share = max(cost.counter_s / STEP_S for cost in costs)
    by_turns = ", ".join(f"{cost.ratio:.4f}" for cost in costs)
    print(f"a step {step_s * 1000:.1f} ms, {WAITS} waits; with / without, by turns: {by_turns}")
    print(f"the counter by itself: {share:.4%} of a step of 5 ms")
    return 0 if share < 0.01 else 1


def _measure(process: ranks.Process) -> Cost:
    fabric = ranks.join(process, 2)
    own = Own()
    medians: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * ROUNDS):
        counted = (turn % 2 == 0) is (turn // 2 % 2 == 0)  # who comes first changes, too
        with contextlib.nullcontext() if counted else _uncounted():
            medians[counted].append(_block(own if counted else None))
    fabric.exchange(b"done")
    pairs = zip(medians[True][1:], medians[False][1:], strict=True)
    return Cost(
        ratio=statistics.median(a / b for a, b in pairs),
        step_s=statistics.median(medians[False]),
        counter_s=_counter_s(),
    )


def _block(own: Own | None) -> float:
    """Return the median of some steps."""
    matrix, message = torch.ones(64, 64), torch.ones(4096)
    lengths = []
    for _ in range(STEPS):
        began = time.perf_counter()
        if own is not None:
            own.begin()
        for _ in range(WAITS):
            until = time.perf_counter() + STEP_S / WAITS
            while time.perf_counter() < until:
                torch.mm(matrix, matrix)
            dist.all_reduce(message)
        if own is not None:
            own.pause()
            own.resume()
            own.end()
        lengths.append(time.perf_counter() - began)
    return statistics.median(lengths)


@contextlib.contextmanager
def _uncounted() -> Iterator[None]:
    """Wait as it would be done if nobody counted."""

    def poll(self: Waiting, poller: select.poll, deadline: float) -> list[tuple[int, int]]:
        events = poller.poll(max(0.0, deadline - self.now) * 1000)
        self.now = time.monotonic()
        return events

    counted = Waiting.poll
    Waiting.poll = poll  # type: ignore[method-assign]
    try:
        yield
    finally:
        Waiting.poll = counted  # type: ignore[method-assign]


def _counter_s() -> float:
    """Return what a step's waits, and its own time, cost more than nothing."""
    idle = Idle()
    idle.follow()
    own = Own(IDLE)

    def wait() -> None:
        began = time.monotonic()
        idle.charge(time.monotonic() - began)

    def step() -> None:
        own.begin()
        own.pause()
        own.resume()
        own.end()

    return WAITS * _per_call(wait) + _per_call(step)


def _per_call(call: Callable[[], None]) -> float:
    """Return the median of some batches: others may want the core in between."""
    batches = []
    for _ in range(_BATCHES):
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        batches.append((time.perf_counter() - began) / _CALLS)
    return statistics.median(batches)


if __name__ == "__main__":
    sys.exit(main())
