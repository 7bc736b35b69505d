"""Torch's own communicators inside the groups: kept, built beside what runs, dropped, aborted."""

from __future__ import annotations

import functools
import os
import pathlib
import socket
import time
from typing import Any

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import Board, Program, in_fabrics, leave, make_plan
from integration.comm.stocked import (
    OLD,
    cross,
    enter,
    exchange_messages,
    inner_of,
    run_members,
    standby,
    total,
)
from support.eventually import eventually
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.timeouts import Timeouts
from tmover.errors import ConfigError, Interrupted

# --- collectives ----------------------------------------------------------------------------------


def gather_and_scatter(rank: int) -> None:
    own, part = torch.tensor([float(rank)]), torch.zeros(1)
    rows = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(rows, own)
    assert torch.cat(rows).tolist() == [0, 1, 2]
    whole = torch.zeros(3)
    dist.all_gather_single(whole, own)
    assert whole.tolist() == [0, 1, 2]
    gathered = [torch.zeros(1) for _ in range(3)] if rank == 1 else None
    dist.gather(own, gathered, dst=1)
    assert gathered is None or torch.cat(gathered).tolist() == [0, 1, 2]
    dist.scatter(part, list(torch.arange(3.0).view(3, 1)) if rank == 0 else None, src=0)
    assert part.item() == rank
    out = torch.zeros(3)
    dist.all_to_all_single(out, torch.arange(3.0) + 10 * rank)
    assert out.tolist() == [rank, 10 + rank, 20 + rank]


def reduce_and_scatter(rank: int) -> None:
    part = torch.zeros(1)
    for _ in range(20):  # gloo writes a result again when it is waited for again
        dist.reduce_scatter_single(part, torch.arange(3.0))
        assert part.item() == 3 * rank
        dist.reduce_scatter(part, list(torch.arange(3.0).view(3, 1)))
        assert part.item() == 3 * rank
    whole = torch.full((3,), float(rank))
    dist.reduce(whole, dst=0)
    assert rank != 0 or whole.tolist() == [3, 3, 3]


def test_every_collective_is_carried() -> None:
    def member(fabric: Fabric, _board: Board, name: str) -> None:
        rank = fabric.rank
        assert total() == 111
        row = torch.tensor([float(rank)])
        dist.broadcast(row, 2)
        assert row.item() == 2
        gather_and_scatter(rank)
        reduce_and_scatter(rank)
        names: list[Any] = [None] * 3
        dist.all_gather_object(names, name)
        assert names == OLD
        dist.barrier()
        exchange_messages(rank)
        pending = dist.all_reduce(row, async_op=True)
        assert pending is not None
        assert pending.get_future().wait()[0] is row
        assert row.item() == 6

    run_members(member)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_coalesced_collectives_are_carried() -> None:
    def member(fabric: Fabric, _board: Board, _name: str) -> None:
        several = [torch.full((2,), float(fabric.rank)), torch.ones(3)]
        dist.all_reduce_coalesced(several)
        assert [tensor[0].item() for tensor in several] == [3, 3]

    run_members(member)


def test_a_call_that_is_wrong_raises_and_breaks_nothing() -> None:
    def member(fabric: Fabric, _board: Board, _name: str) -> None:
        with pytest.raises(RuntimeError, match="own output tensor"):
            dist.all_gather([torch.zeros(5) for _ in range(3)], torch.zeros(1))
        assert total() == 111
        assert fabric.mode is Mode.LIVE

    run_members(member)


# --- planned moves --------------------------------------------------------------------------------

MOVES = 20


def count() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return (
        len(list(pathlib.Path("/proc/self/fd").iterdir())),
        len(list(pathlib.Path("/proc/self/task").iterdir())),
    )


def move_on(fabric: Fabric, board: Board, move: int) -> None:
    """Enter the world in which rank 1 is with the standby of this number."""
    cross(fabric, board, move + 1, ["n0", f"s{move}", "n2"])
    assert total() == 111
    board.put(f"passed/{move}/{fabric.rank}")


def give_way(board: Board, move: int) -> None:
    """Wait until all have passed into the next world."""
    for rank in range(3):
        board.get(f"passed/{move + 1}/{rank}")


def one_of_many(board: Board, move: int) -> None:
    """Take rank 1, and give it to the next one."""
    if move > 1:
        board.get(f"passed/{move - 1}/1")
    fabric = standby(board, f"s{move}")
    assert dist.new_group([0, 2]) is not None
    move_on(fabric, board, move)
    if move < MOVES:
        give_way(board, move)
    else:
        fabric.exchange(b"done")
    leave(fabric)


def test_twenty_moves_leave_nothing_behind() -> None:
    """Rank 1 goes through 20 standbys; ranks 0 and 2 stay."""

    def member(fabric: Fabric, board: Board, name: str) -> bool:
        others = dist.new_group([0, 2])
        assert total() == 111
        if name == "n1":
            give_way(board, 0)
            return False
        before, first = (0, 0), None
        for move in range(1, MOVES + 1):
            move_on(fabric, board, move)
            dist.barrier(others)
            first = first or inner_of(fabric, others)
            fabric.release(move + 1)
            if move == 2:
                before = count()
        assert eventually(lambda: count() <= before, timeout_s=10), (before, count())
        fabric.exchange(b"done")
        return inner_of(fabric, others) is first

    joiners: dict[str, Program] = {
        f"s{move}": functools.partial(one_of_many, move=move) for move in range(1, MOVES + 1)
    }
    found = run_members(member, joiners, deadline_s=90)

    assert found["n0"].value is True
    assert found["n2"].value is True


def test_a_group_made_in_the_loop_gets_its_communicator_when_it_is_used() -> None:
    def member(fabric: Fabric, board: Board, name: str) -> None:
        assert total() == 111
        fabric.prepare(make_plan(board, 2, OLD), timeout_s=20)
        group = dist.new_group([0, 1])
        if name != "n2":
            dist.barrier(group)
        before = inner_of(fabric, group) if name != "n2" else None
        enter(fabric, 2)
        fabric.release(2)
        if name != "n2":
            assert inner_of(fabric, group) is before
            dist.barrier(group)

    run_members(member)


def test_groups_are_destroyed_and_made_again_by_the_same_name() -> None:
    def member(fabric: Fabric, _board: Board, _name: str) -> None:
        assert total() == 111
        before = inner_of(fabric)
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        assert total() == 111
        assert inner_of(fabric) is not before
        with pytest.raises(ConfigError, match="cannot count"):
            store_of(fabric).add("a key", 1)

    def store_of(fabric: Fabric) -> Any:
        communicator: Any = inner_of(fabric).communicator
        return communicator.store

    run_members(member)


# --- failures -------------------------------------------------------------------------------------


def test_a_collective_and_a_message_that_hang_end_with_the_world() -> None:
    """Rank 2 takes part in nothing; the others wait for it until it revokes the epoch."""

    def hang(fabric: Fabric, board: Board, name: str) -> None:
        fabric.attempt_open = True
        got, tensor = torch.zeros(3), torch.ones(1000)
        message = dist.irecv(got, 2)
        work = dist.all_reduce(tensor, async_op=True)
        board.put(f"hanging/{name}")
        assert work is not None
        assert message is not None
        work.wait()
        message.wait()
        assert got.tolist() == [1, 1, 1]  # an answer
        assert fabric.mode is Mode.REVOKED
        dist.all_reduce(tensor)
        fabric.attempt_open = False
        with pytest.raises(Interrupted):
            dist.all_reduce(tensor)

    def member(fabric: Fabric, board: Board, name: str) -> None:
        assert total() == 111
        before = inner_of(fabric)
        exchange_messages(fabric.rank)
        if name == "n2":
            board.get("hanging/n0")
            board.get("hanging/n1")
            fabric.revoke(1, "a test says so")
        else:
            hang(fabric, board, name)
        fabric.quiesce()
        cross(fabric, board, 2, OLD)
        fabric.release(2)
        assert inner_of(fabric) is not before
        assert total() == 111
        exchange_messages(fabric.rank)

    run_members(member)


def test_a_forked_child_holds_no_connection_of_gloo() -> None:
    def member(_fabric: Fabric, _board: Board, _name: str) -> None:
        assert total() == 111
        if os.fork() == 0:
            sockets = [
                entry
                for entry in pathlib.Path("/proc/self/fd").iterdir()
                if entry.is_socket() and _is_ip(int(entry.name))
            ]
            os._exit(len(sockets))
        _, status = os.wait()
        assert status == 0
        assert total() == 111

    run_members(member)


def _is_ip(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as sock:
        return sock.family == socket.AF_INET


@pytest.mark.parametrize("sends_first", [False, True])
def test_a_message_may_take_longer_than_a_communicator_to_build(*, sends_first: bool) -> None:
    """Gloo's messages go by the time that their communicator was built within, unless told."""

    def program(fabric: Fabric, board: Board, name: str) -> Mode:
        tensor = torch.full((5_000_000,), 7.0 * fabric.rank)
        dist.barrier()
        if (fabric.rank == 1) is not sends_first:
            time.sleep(1.5)
        if fabric.rank == 1:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 1)
            assert (tensor == 7.0).all()
        board.put(f"over/{name}")
        for other in ("n0", "n1"):
            board.get(f"over/{other}")
        return fabric.mode

    timeouts = Timeouts(handshake_s=1.0, collective_s=20.0, barrier_s=20.0)
    found = in_fabrics(program, 2, kind="generation", timeouts=timeouts)

    assert set(found.values()) == {Mode.LIVE}
