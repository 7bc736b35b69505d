"""Groups get their communicators in whatever order ranks begin to use them, as gloo's have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from integration.comm.harness import Board, leave
from integration.comm.stocked import NEW, cross, inner_of, run_members, standby, total
from support.eventually import eventually
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.stock import Gloo, GlooStock
from tmover.comm.store import GroupStore
from tmover.errors import LinkError


def start_sums(groups: list[Any]) -> list[tuple[Any, torch.Tensor]]:
    """Start a sum in each group, in this order, and wait for none."""
    started = []
    for group in groups:
        row = torch.full((1,), float(dist.get_rank() + 1))
        started.append((dist.all_reduce(row, group=group, async_op=True), row))
    return started


def test_groups_may_be_used_for_the_first_time_in_opposite_orders() -> None:
    def member(fabric: Fabric, _board: Board, name: str) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group([0, 1])]
        if name == "n2":
            return
        for work, row in start_sums(groups if name == "n0" else groups[::-1]):
            work.wait()
            assert row.item() == 3
        assert fabric.mode is Mode.LIVE

    run_members(member)


def test_groups_may_be_used_for_the_first_time_in_a_ring() -> None:
    """Each rank waits for another one's second group."""

    def member(_fabric: Fabric, _board: Board, name: str) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
        order = {"n0": (0, 2), "n1": (1, 0), "n2": (2, 1)}[name]
        for work, row in start_sums([pairs[index] for index in order]):
            work.wait()
            assert row.item() in (3, 4, 5)

    run_members(member)


def test_members_that_only_listen_later_do_not_keep_others_waiting() -> None:
    """Rank 2 uses the group only after ranks 0 and 1 are through with it."""

    def member(_fabric: Fabric, board: Board, name: str) -> None:
        assert total() == 111
        group = dist.new_group([0, 1, 2])
        row = torch.ones(1)
        if name == "n0":
            dist.send(row, 1, group=group)
            board.put("through")
        elif name == "n1":
            dist.recv(row, 0, group=group)
        else:
            board.get("through")
        dist.barrier(group)

    run_members(member)


def test_a_group_that_is_made_late_is_built_for_those_who_wait() -> None:
    """Rank 2 makes it when rank 0 is here to build it, and does not use it before rank 0 has."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        assert total() == 111
        row, told = torch.ones(1), fabric.wiring.rendezvous
        if name == "n2":
            assert eventually(lambda: sum(key.endswith("/here/0") for key in told.keys(1)) == 2)
        group = dist.new_group([0, 1, 2])
        if name == "n0":
            dist.send(row, 1, group=group)
            board.put("through")
        elif name == "n1":
            dist.recv(row, 0, group=group)
        else:
            board.get("through")
        dist.barrier(group)

    run_members(member)


def test_what_was_built_for_others_is_kept_through_a_move() -> None:
    """Rank 2 has not used the group before the move, nor has rank 0 waited for it to do so."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        assert total() == 111
        group = dist.new_group([0, 2])
        pending = dist.isend(torch.ones(1), 2, group=group) if name == "n0" else None
        fabric.exchange(b"the step is over")
        if name == "n1":
            board.get("passed/n0")
            board.get("passed/n2")
            return
        before = inner_of(fabric, group)
        cross(fabric, board, 2, NEW)
        board.put(f"passed/{name}")
        fabric.release(2)
        assert inner_of(fabric, group) is before
        if name == "n2":
            row = torch.zeros(1)
            dist.recv(row, 0, group=group)
            assert row.item() == 1
        elif pending is not None:
            pending.wait()
        dist.barrier(group)
        assert total() == 111

    def joiner(board: Board) -> None:
        fabric = standby(board)
        assert dist.new_group([0, 2]) is not None
        cross(fabric, board, 2, NEW)
        assert total() == 111
        leave(fabric)

    run_members(member, {"s0": joiner})


class Failing(GlooStock):
    """Cannot keep anything but what all ranks use."""

    def build(self, store: GroupStore, rank: int, size: int, *, timeout_s: float) -> Gloo:
        made = super().build(store, rank, size, timeout_s=timeout_s)
        if size == 3:
            return made
        msg = "a test says so"
        raise LinkError(msg)


def test_who_cannot_build_for_others_tells_them_and_accuses_nobody() -> None:
    """Rank 1 is asked to build what it does not use itself; rank 0 hears why it has none."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        seen: list[tuple[str, ...]] = []
        fabric.on_broken = lambda _epoch, peers, _reason: seen.append(peers)
        if name == "n1":
            fabric.generation._stocks = {"cpu": Failing("127.0.0.1")}
        assert total() == 111
        group = dist.new_group([0, 1])
        if name == "n0":
            fabric.attempt_open = True
            dist.barrier(group)
            assert fabric.mode is Mode.REVOKED
            world = fabric.worlds.present
            assert world is not None
            assert world.latch.reason == "another rank could not build: a test says so"
            fabric.attempt_open = False
        else:
            assert eventually(lambda: fabric.mode is Mode.REVOKED)
        assert seen == []
        cross(fabric, board, 2, ["n0", "n1", "n2"])
        assert total() == 111

    run_members(member)
