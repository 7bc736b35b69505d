"""What is wrong between ranks is noticed on arrival; on one rank, before anything is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import Board, Program, in_world, join, leave, make_fabric, run
from integration.comm.parity.refusals import untyped
from tmover.comm import intercept
from tmover.errors import CallError, CallTypeError, ConfigError, Interrupted, ProtocolError

Call = Callable[[Any, int], Any]


def ones(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def pair(count: int = 4) -> list[torch.Tensor]:
    return [ones(count), ones(count)]


def apart(program: Callable[[int, int], str], size: int) -> dict[str, str]:
    """Run a program that breaks its world on every rank; nobody leaves before all are through."""
    names = [f"n{rank}" for rank in range(size)]

    def body(board: Board, rank: int) -> str:
        fabric = join(board, names[rank], names)
        text = program(rank, size)
        if "ranks do different things" in text:
            fabric.revoke(fabric.epoch, "told")  # as the session does when the attempt has failed
        board.put(f"over/{rank}")
        for other in range(size):
            board.get(f"over/{other}")
        leave(fabric)
        return text

    programs: dict[str, Program] = {
        name: functools.partial(body, rank=rank) for rank, name in enumerate(names)
    }
    return {name: outcome.value for name, outcome in run(programs).items()}


# What rank 0 does and what rank 1 does, in a group of two.
DIFFERENT: dict[str, tuple[Call, Call]] = {
    "reduce or all_reduce": (
        lambda group, rank: dist.reduce(ones(), group=group, group_dst=0),
        lambda group, rank: dist.all_reduce(ones(), group=group),
    ),
    "reduce on another root": (
        lambda group, rank: dist.reduce(ones(), group=group, group_dst=0),
        lambda group, rank: dist.reduce(ones(), group=group, group_dst=1),
    ),
    "reduce by another operation": (
        lambda group, rank: dist.reduce(ones(), group=group, group_dst=0),
        lambda group, rank: dist.reduce(ones(), group=group, group_dst=0, op=dist.ReduceOp.MAX),
    ),
    "broadcast of another length": (
        lambda group, rank: dist.broadcast(ones(3), group=group, group_src=0),
        lambda group, rank: dist.broadcast(ones(4), group=group, group_src=0),
    ),
    "broadcast of another type": (
        lambda group, rank: dist.broadcast(ones(4), group=group, group_src=0),
        lambda group, rank: dist.broadcast(ones(4, torch.int32), group=group, group_src=0),
    ),
    "all_gather of another length": (
        lambda group, rank: dist.all_gather(pair(3), ones(3), group=group),
        lambda group, rank: dist.all_gather(pair(4), ones(4), group=group),
    ),
    "all_gather of another type": (
        lambda group, rank: dist.all_gather_into_tensor(ones(8), ones(4), group=group),
        lambda group, rank: dist.all_gather_into_tensor(
            ones(8, torch.int32), ones(4, torch.int32), group=group
        ),
    ),
    "reduce_scatter of another length": (
        lambda group, rank: dist.reduce_scatter_tensor(ones(3), ones(6), group=group),
        lambda group, rank: dist.reduce_scatter_tensor(ones(4), ones(8), group=group),
    ),
    "gather of another length": (
        lambda group, rank: dist.gather(ones(3), pair(3), group=group, group_dst=0),
        lambda group, rank: dist.gather(ones(4), group=group, group_dst=0),
    ),
    "scatter of another length": (
        lambda group, rank: dist.scatter(ones(3), pair(3), group=group, group_src=0),
        lambda group, rank: dist.scatter(ones(4), group=group, group_src=0),
    ),
    "all_to_all of another length": (
        lambda group, rank: dist.all_to_all(pair(3), pair(3), group=group),
        lambda group, rank: dist.all_to_all(pair(4), pair(4), group=group),
    ),
    "all_to_all_single of other sizes": (
        lambda group, rank: dist.all_to_all_single(ones(4), ones(4), [1, 3], [1, 3], group=group),
        lambda group, rank: dist.all_to_all_single(ones(4), ones(4), [1, 3], [1, 3], group=group),
    ),
    "barrier or all_gather": (
        lambda group, rank: dist.barrier(group),
        lambda group, rank: dist.all_gather(pair(), ones(), group=group),
    ),
    "sparse tensors of another shape": (
        lambda group, rank: dist.all_reduce(torch.eye(3).to_sparse(), group=group),
        lambda group, rank: dist.all_reduce(torch.eye(4).to_sparse(), group=group),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_of_a_subgroup_that_do_different_things_are_told(name: str) -> None:
    def program(rank: int, _size: int) -> str:
        group = dist.new_group([0, 2])
        if rank == 1:
            return ""
        try:
            DIFFERENT[name][rank // 2](group, rank // 2)
            dist.barrier(group)  # who only sent is told by the next collective
        except (ProtocolError, Interrupted) as error:
            return str(error)
        return "nothing"

    found = apart(program, 3)

    assert any("ranks do different things" in text for text in found.values()), found


def test_a_message_of_another_length_is_told() -> None:
    def program(rank: int, _size: int) -> str:
        if rank == 0:
            dist.send(ones(3), 1, tag=4)
            return ""
        with pytest.raises(ProtocolError) as caught:
            dist.recv(ones(4), 0, tag=4)
        return str(caught.value)

    assert "rank 0 sends a message with tag 4 of 12 bytes" in apart(program, 2)["n1"]


def test_a_barrier_keeps_to_the_time_it_is_given() -> None:
    def program(rank: int, _size: int) -> str:
        dist.barrier()
        if rank == 1:
            return ""
        with pytest.raises(Interrupted) as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        return str(caught.value)

    assert "nothing from n1-0000/0 within 0.2 s" in apart(program, 2)["n0"]


# What gloo does not survive: it crashes, or writes beyond the tensors' memory.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "send to a rank beyond": (
        lambda: dist.send(ones(), group_dst=9),
        CallError,
        "there is no rank 9 in a group of 2",
    ),
    "receive from a rank beyond": (
        lambda: dist.recv(ones(), group_src=9),
        CallError,
        "there is no rank 9 in a group of 2",
    ),
    "a scalar that is split": (
        lambda: dist.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0)),
        CallError,
        "no dimension to split",
    ),
    "a negative size": (
        lambda: dist.all_to_all_single(ones(2), ones(2), [-1, 3], [-1, 3]),
        CallError,
        "do not split a first dimension of 2",
    ),
    "a part of its own of two lengths": (
        lambda: dist.all_to_all_single(ones(4), ones(6)),
        CallError,
        "has 3 elements in the input, 2 in the output",
    ),
    "an indivisible tensor": (
        lambda: dist.all_to_all_single(ones(5), ones(5)),
        CallError,
        "5, is no multiple of 2",
    ),
    "elements that share memory": (
        lambda: dist.all_reduce(ones(1).expand(3)),
        CallError,
        "share memory",
    ),
    "a tensor without memory": (
        lambda: dist.all_reduce(torch.ones(3, device="meta")),
        NotImplementedError,
        "only dense tensors on the CPU",
    ),
    "a tag of text": (
        lambda: dist.send(ones(), 0 if dist.get_rank() else 1, tag=untyped.__name__),
        CallTypeError,
        "tags are whole numbers",
    ),
}


def _told() -> dict[str, str]:
    texts = {}
    for name, (call, kind, _words) in REFUSED.items():
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, ConfigError)
        texts[name] = str(caught.value)
    return texts


def test_what_gloo_does_not_survive_is_refused() -> None:
    for texts in in_world(lambda rank, size: _told(), 2).values():
        for name, text in texts.items():
            assert REFUSED[name][2] in text


def test_a_rehearsal_refuses_the_same() -> None:
    def body(board: Board) -> dict[str, str]:
        fabric = make_fabric(board, "s0")
        fabric.rehearse(1, 2)
        intercept.install(fabric)
        dist.init_process_group("gloo")
        texts = _told()
        leave(fabric)
        return texts

    for name, text in run({"s0": body})["s0"].value.items():
        assert REFUSED[name][2] in text
