"""What the thread that trains has waited for others: seen by who waits, not by who is late.

The late rank comes when it is seen that the other one has waited for `SHORT_S` at least.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from integration.comm.harness import Board, in_fabrics
from support.eventually import eventually
from tmover.comm.fabric import Fabric
from tmover.comm.idle import IDLE
from tmover.comm.waits import waits

SHORT_S = 0.1
Together = Callable[[Fabric], object]


def vote(fabric: Fabric) -> None:
    fabric.exchange(b"good")


def reduce_small(_fabric: Fabric) -> None:
    dist.all_reduce(torch.ones(3))


def reduce_large(_fabric: Fabric) -> None:
    dist.all_reduce(torch.ones(1_000_000))


def reduce_beside(_fabric: Fabric) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()


def reduce_after_another(_fabric: Fabric) -> None:
    first = dist.all_reduce(torch.ones(3), async_op=True)
    dist.all_reduce(torch.ones(3))
    assert first is not None
    first.wait()


def receive(fabric: Fabric) -> None:
    tensor = torch.ones(3)
    if fabric.rank == 1:
        dist.send(tensor, 0)
    else:
        dist.recv(tensor, 1)


def awaits(fabric: Fabric) -> bool:
    return any(wait.is_awaited for wait in waits(fabric.present()).values())


def tell_when_waited(fabric: Fabric, board: Board) -> threading.Thread:
    """Say on the board that this rank has waited for `SHORT_S`, once it has."""

    def watch() -> None:
        eventually(lambda: awaits(fabric), timeout_s=10)
        began = time.monotonic()
        eventually(lambda: time.monotonic() - began > SHORT_S, timeout_s=10)
        board.put("waited")

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "together",
    [vote, reduce_small, reduce_large, reduce_beside, reduce_after_another, receive],
)
def test_who_waits_for_a_late_rank_is_idle_and_who_is_late_is_not(together: Together) -> None:
    def body(fabric: Fabric, board: Board, _name: str) -> float:
        dist.all_reduce(torch.ones(3))
        fabric.exchange(b"here")
        IDLE.follow()
        before = IDLE.seconds
        if fabric.rank == 1:
            board.get("waited")
            late = IDLE.seconds - before
            together(fabric)
            return late
        teller = tell_when_waited(fabric, board)
        together(fabric)
        teller.join()
        return IDLE.seconds - before

    found = in_fabrics(body, 2)

    assert found["n0"] > 0
    assert found["n1"] == 0


def test_a_wait_beside_what_is_computed_keeps_nobody_idle() -> None:
    def body(fabric: Fabric, board: Board, _name: str) -> float:
        dist.all_reduce(torch.ones(3))
        fabric.exchange(b"here")
        IDLE.follow()
        before = IDLE.seconds
        if fabric.rank == 1:
            board.get("waited")
            dist.all_reduce(torch.ones(3))
            return 0.0
        teller = tell_when_waited(fabric, board)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        teller.join()  # it computes
        eventually(work.is_completed, timeout_s=10)
        work.wait()
        return IDLE.seconds - before

    assert in_fabrics(body, 2)["n0"] == 0


@pytest.mark.parametrize("kind", ["links", "generation"])
def test_the_wait_at_the_end_of_a_backward_of_ddp_is_seen(kind: str) -> None:
    """It is in C++, for a future."""

    def body(fabric: Fabric, board: Board, _name: str) -> tuple[float, float]:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        loss = model(torch.ones(1, 4)).sum()  # in this forward DDP lays its buckets anew, together
        fabric.exchange(b"here")
        IDLE.follow()
        before = IDLE.seconds
        if fabric.rank == 1:
            board.get("backward")
            late = IDLE.seconds - before
            loss.backward()
            fabric.exchange(b"done")
            return late, 0.0

        def watch() -> None:
            eventually(lambda: IDLE.is_blocked, timeout_s=10)
            began = time.monotonic()
            eventually(lambda: time.monotonic() - began > SHORT_S, timeout_s=10)
            board.put("backward")

        teller = threading.Thread(target=watch)
        teller.start()
        loss.backward()
        waited = IDLE.seconds - before
        teller.join()
        fabric.exchange(b"done")
        after = IDLE.seconds
        assert not IDLE.is_blocked
        torch.ones(2, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
        return waited, IDLE.seconds - after

    found = in_fabrics(body, 2, kind=kind)

    assert found["n0"][0] > 0
    assert found["n0"][1] == 0
    assert found["n1"] == (0, 0)


def test_what_other_threads_wait_for_is_not_counted() -> None:
    before = IDLE.seconds
    IDLE.follow()

    def charge() -> None:
        with IDLE.waiting():
            IDLE.charge(5.0)

    other = threading.Thread(target=charge)
    other.start()
    other.join()

    assert IDLE.seconds == before
    IDLE.charge(2.0)
    assert IDLE.seconds == before + 2.0
