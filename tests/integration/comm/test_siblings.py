"""Workers of one standby that rehearse: inside the node they speak to each other for real."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from integration.comm.harness import SECRET, TIMEOUTS, Board, leave, register, run
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.replay import Replay
from tmover.comm.siblings import Siblings
from tmover.core.events import Member, Plan

NPROC = 2
PATIENCE_S = 20.0
Program = Callable[[Fabric, Siblings, int, Board], Any]


class Own(NamedTuple):
    worker: str
    nproc: int = NPROC


def rehearse(
    *programs: Program, patience_s: float = PATIENCE_S, slot: int = 1, nnodes: int = 3
) -> list[Any]:
    """Run a program in each worker of a standby that rehearses a slot."""

    def body(board: Board, local: int, program: Program) -> Any:
        own = Own(f"s0-0000/{local}")
        fabric = Fabric(
            job="job", secret=SECRET, uid=own.worker, address="127.0.0.1", timeouts=TIMEOUTS
        )
        board.put(f"endpoint/{local}", fabric.endpoint)
        siblings = Siblings(fabric.wiring, own, patience_s=patience_s)
        siblings.hear([board.get(f"endpoint/{other}") for other in range(NPROC)])
        rank = slot * NPROC + local
        fabric.rehearse(rank, nnodes * NPROC)
        fabric.rehearsal = Replay(siblings, nproc=NPROC)
        siblings.begin(slot)
        register(fabric)
        result = program(fabric, siblings, rank, board)
        board.put(f"done/{local}")
        for other in range(NPROC):
            board.get(f"done/{other}")
        siblings.close()
        leave(fabric)
        return result

    bodies = {
        str(local): functools.partial(body, local=local, program=program)
        for local, program in enumerate(programs)
    }
    outcomes = run(bodies)
    return [outcomes[name].value for name in bodies]


def near_group() -> dist.ProcessGroup:
    """Make the group of each node; return this one's."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, 6, NPROC)]
    return next(group for group in groups if isinstance(group, dist.ProcessGroup))


def test_a_group_inside_the_node_is_carried_for_real() -> None:
    def program(fabric: Fabric, siblings: Siblings, rank: int, _board: Board) -> Any:
        group = near_group()
        assert fabric.wiring.live == 0
        value = torch.full((3,), float(rank))
        dist.all_reduce(value, group=group)
        pending = [
            dist.all_reduce(torch.ones(1000) * rank, group=group, async_op=True) for _ in range(5)
        ]
        results = [work.result()[0][0].item() for work in pending if work and work.wait()]
        names: list[Any] = [None] * NPROC
        dist.all_gather_object(names, f"rank {rank}", group=group)
        everybody = torch.full((2,), float(rank))
        dist.all_reduce(everybody)
        assert fabric.wiring.live > 0
        return value.tolist(), results, names, everybody.tolist(), siblings.trouble, siblings.spoke

    for rank, (value, results, names, everybody, trouble, spoke) in enumerate(
        rehearse(program, program), start=2
    ):
        assert value == [5.0] * 3
        assert results == [5.0] * 5
        assert names == ["rank 2", "rank 3"]
        assert everybody == [float(rank)] * 2
        assert (trouble, spoke) == ("", True)


def test_messages_between_neighbours_in_the_node_are_real_and_others_are_not() -> None:
    def program(_fabric: Fabric, _siblings: Siblings, rank: int, _board: Board) -> Any:
        before, after = (rank - 1) % 6, (rank + 1) % 6
        got = [torch.zeros(4), torch.zeros(4)]
        sent = torch.full((4,), float(rank))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, before),
                dist.P2POp(dist.isend, sent, after),
                dist.P2POp(dist.irecv, got[0], before),
                dist.P2POp(dist.irecv, got[1], after),
            ]
        )
        for work in works:
            work.wait()
        return [one[0].item() for one in got]

    assert rehearse(program, program) == [[1.0, 3.0], [2.0, 1.0]]


def test_each_round_begins_with_links_of_its_own() -> None:
    def program(_fabric: Fabric, siblings: Siblings, rank: int, _board: Board) -> Any:
        group, seen = near_group(), []
        for turn in range(3):
            value = torch.full((1,), float(rank + turn))
            dist.all_reduce(value, group=group)
            seen.append(value.item())
            siblings.begin(1)
        return seen, siblings.trouble

    assert rehearse(program, program) == [([5.0, 7.0, 9.0], "")] * 2


def test_a_sibling_that_does_not_come_is_made_up_and_waited_for_once() -> None:
    def comes(_fabric: Fabric, siblings: Siblings, _rank: int, _board: Board) -> Any:
        group = near_group()
        values = [torch.ones(2), torch.ones(2)]
        for value in values:
            dist.all_reduce(value, group=group)
        got = torch.zeros(1)
        dist.recv(got, 3)
        return [value.tolist() for value in values], got.item(), siblings.trouble

    def stays_away(_fabric: Fabric, _siblings: Siblings, _rank: int, _board: Board) -> Any:
        return None

    values, got, trouble = rehearse(comes, stays_away, patience_s=0.3)[0]

    assert values == [[1.0, 1.0]] * 2
    assert got == 1.0
    assert "s0-0000/1" in trouble


def test_who_does_something_else_is_made_up_and_nobody_fails() -> None:
    def program(_fabric: Fabric, siblings: Siblings, rank: int, _board: Board) -> Any:
        group = near_group()
        value = torch.ones(2 if rank == 2 else 3)
        dist.all_reduce(value, group=group)
        if rank == 2:
            dist.send(torch.ones(2), 3)
        else:
            dist.recv(torch.ones(5), 2)
        return bool(siblings.trouble)

    assert rehearse(program, program) == [True, True]


def test_a_message_of_another_size_is_made_up_too() -> None:
    def program(_fabric: Fabric, _siblings: Siblings, rank: int, _board: Board) -> Any:
        if rank == 2:
            dist.send(torch.full((2,), 7.0), 3)
            return None
        got = torch.zeros(5)
        dist.recv(got, 2)
        return got.tolist()

    assert rehearse(program, program)[1] == [1.0] * 5


def test_a_sibling_that_dies_keeps_nobody_waiting() -> None:
    def stays(_fabric: Fabric, siblings: Siblings, _rank: int, _board: Board) -> Any:
        group = near_group()
        dist.all_reduce(torch.ones(2), group=group)
        value = torch.ones(2)
        dist.all_reduce(value, group=group)
        return value.tolist(), bool(siblings.trouble)

    def goes(fabric: Fabric, siblings: Siblings, _rank: int, _board: Board) -> Any:
        dist.all_reduce(torch.ones(2), group=near_group())
        siblings.close()
        return None

    assert rehearse(stays, goes, patience_s=60.0)[0] == ([1.0, 1.0], True)


def test_a_sibling_that_is_a_rank_of_the_job_by_now_is_not_disturbed() -> None:
    def promoted(fabric: Fabric, siblings: Siblings, rank: int, board: Board) -> Any:
        siblings.close()
        fabric.rehearsal = None
        member = Member(rank=0, worker="s0-0000/0", node="n", endpoint=fabric.endpoint)
        fabric.form(Plan(epoch=1, members=(member,)), timeout_s=5)
        board.put("promoted")
        board.get("has tried")
        return fabric.exchange(b"vote"), fabric.mode, rank

    def rehearses(_fabric: Fabric, siblings: Siblings, _rank: int, board: Board) -> Any:
        board.get("promoted")
        group = near_group()
        dist.all_reduce(value := torch.ones(2), group=group)
        board.put("has tried")
        return value.tolist(), siblings.trouble

    live, late = rehearse(promoted, rehearses)

    assert live == ([b"vote"], Mode.LIVE, 2)
    assert late[0] == [1.0, 1.0]
    assert "epoch 0 is over" in late[1]
