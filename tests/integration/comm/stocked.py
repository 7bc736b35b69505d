"""Worlds whose collectives are carried by torch's own communicators, for tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed as dist

from integration.comm.harness import (
    DEADLINE_S,
    TIMEOUTS,
    Board,
    Outcome,
    Program,
    join,
    leave,
    make_fabric,
    make_plan,
    run,
)
from tmover.comm import intercept
from tmover.comm.fabric import Fabric
from tmover.comm.generation import Use
from tmover.comm.inner import Inner
from tmover.comm.timeouts import Timeouts

OLD, NEW = ["n0", "n1", "n2"], ["n0", "s0", "n2"]
Member = Callable[[Fabric, Board, str], Any]


PATIENT = dataclasses.replace(TIMEOUTS, handshake_s=20.0)
"""For worlds in which a communicator is not built, so that no deadline ends that."""


def stocked(board: Board, name: str, *, timeouts: Timeouts = TIMEOUTS) -> Fabric:
    """Return a fabric of this process."""
    return make_fabric(board, name, kind="generation", timeouts=timeouts)


def run_members(
    member: Member,
    others: Mapping[str, Program] | None = None,
    *,
    names: list[str] = OLD,
    deadline_s: float = DEADLINE_S,
    timeouts: Timeouts = TIMEOUTS,
) -> dict[str, Outcome]:
    """Run `member(fabric, board, name)` on the ranks of a fresh world, beside others."""

    def body(board: Board, name: str) -> Any:
        fabric = join(board, name, names, kind="generation", timeouts=timeouts)
        result = member(fabric, board, name)
        leave(fabric)
        return result

    programs: dict[str, Program] = {name: functools.partial(body, name=name) for name in names}
    return run({**programs, **(others or {})}, deadline_s=deadline_s)


def standby(board: Board, name: str = "s0", *, timeouts: Timeouts = TIMEOUTS) -> Fabric:
    """Return a fabric that has rehearsed rank 1 of 3."""
    fabric = stocked(board, name, timeouts=timeouts)
    fabric.rehearse(1, 3)
    intercept.install(fabric)
    dist.init_process_group("gloo")
    total()
    return fabric


def total() -> float:
    """Return a sum over all ranks."""
    tensor = torch.full((1000,), float(10 ** dist.get_rank()))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, tensor[0].item()))
    return tensor[0].item()


def exchange_messages(rank: int) -> None:
    """Let three ranks send to each other."""
    got = torch.zeros(1)
    pending = dist.isend(torch.tensor([float(rank)]), (rank + 1) % 3)
    dist.recv(got, (rank - 1) % 3)
    assert got.item() == (rank - 1) % 3
    assert pending is not None
    pending.wait()
    if rank == 0:
        senders = {dist.recv(got) for _ in range(2)}
        assert senders == {1, 2}
    else:
        dist.send(torch.ones(1), 0)


def inner_of(fabric: Fabric, group: Any = None) -> Inner:
    """Return what a group uses now."""
    own: Any = group or dist.group.WORLD
    return fabric.generation.inners(fabric.epoch)[Use(own.wire_name, "cpu")]


def enter(fabric: Fabric, epoch: int) -> None:
    """Pass the barrier of a prepared world."""
    fabric.barrier(epoch)
    fabric.commit(epoch)


def cross(fabric: Fabric, board: Board, epoch: int, names: list[str]) -> None:
    """Prepare a world and enter it."""
    fabric.prepare(make_plan(board, epoch, names), timeout_s=20)
    enter(fabric, epoch)
