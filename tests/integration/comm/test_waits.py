"""Who waits for whom, and how long: the rank that keeps all others waiting is told apart."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import Board, in_fabrics
from support.eventually import eventually
from tmover.comm.fabric import Fabric
from tmover.comm.waits import waits
from tmover.comm.world import World
from tmover.errors import Interrupted

LATE = 2
Together = Callable[[Fabric], object]


def vote(fabric: Fabric) -> None:
    fabric.exchange(b"good")


def reduce_small(_fabric: Fabric) -> None:
    dist.all_reduce(torch.ones(3))


def reduce_large(_fabric: Fabric) -> None:
    dist.all_reduce(torch.ones(1_000_000))


def receive(fabric: Fabric) -> None:
    if fabric.rank == LATE:
        for rank in range(LATE):
            dist.send(torch.ones(3), rank)
    else:
        dist.recv(torch.ones(3), LATE)


def awaited(world: World) -> set[int]:
    return {rank for rank, wait in waits(world).items() if wait.is_awaited}


@contextlib.contextmanager
def telling(fabric: Fabric, board: Board) -> Iterator[None]:
    """Say on the board that this rank waits, as soon as it does."""
    world = fabric.present()

    def watch() -> None:
        eventually(lambda: awaited(world), timeout_s=10)
        board.put(f"waits/{fabric.rank}")

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("together", [vote, reduce_small, reduce_large, receive])
def test_the_rank_that_is_late_is_awaited_and_charged(together: Together) -> None:
    """It is late until the others are seen to wait."""

    def body(fabric: Fabric, board: Board, _name: str) -> dict[int, float]:
        dist.all_reduce(torch.ones(3))
        before = waits(fabric.present())
        if fabric.rank == LATE:
            for rank in range(LATE):
                board.get(f"waits/{rank}")
            together(fabric)
        else:
            with telling(fabric, board):
                together(fabric)
        after = waits(fabric.present())
        assert not any(wait.is_awaited for wait in after.values())
        return {rank: wait.waited_s - before[rank].waited_s for rank, wait in after.items()}

    found = in_fabrics(body, 3)

    in_a_ring = together is reduce_large  # where rank 1 waits for rank 0, which waits for the last
    for name in ("n0",) if in_a_ring else ("n0", "n1"):
        assert max(found[name], key=found[name].__getitem__) == LATE
        assert found[name][LATE] > 0
    if in_a_ring:
        assert found["n1"][LATE] == 0


def test_a_wait_that_is_broken_off_is_charged_too() -> None:
    def body(fabric: Fabric, board: Board, _name: str) -> None:
        world = fabric.present()
        if fabric.rank == LATE:
            board.get("waits/0")
            board.get("waits/1")
            fabric.revoke(1, "a test says so")
        else:
            with telling(fabric, board), pytest.raises(Interrupted):
                fabric.exchange(b"good")
            assert waits(world)[LATE].waited_s > 0
            assert not awaited(world)
        board.put(f"over/{fabric.rank}")
        for rank in range(3):
            board.get(f"over/{rank}")

    in_fabrics(body, 3)
