"""Groups that are destroyed, and groups that are made again by the name of one that was."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import FABRICS, Board, in_fabrics
from support.eventually import eventually
from tmover.comm.fabric import Fabric
from tmover.errors import CallError

EVERY_FABRIC = pytest.mark.parametrize("kind", list(FABRICS))


def local_group(ranks: list[int]) -> dist.ProcessGroup:
    """Make a group of which only its ranks know: torch names it after them."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def test_a_group_made_again_gets_no_message_of_the_one_before() -> None:
    def member(fabric: Fabric, board: Board, _name: str) -> float:
        other, tensor = 1 - fabric.rank, torch.zeros(1)
        first = local_group([0, 1])
        if fabric.rank == 0:
            dist.send(torch.tensor([1.0]), other, group=first)
            board.put("sent")
        else:
            board.get("sent")
        name = first.group_name
        dist.destroy_process_group(first)
        second = local_group([0, 1])
        assert second.group_name == name or torch.__version__ >= "2.14"  # which counts them
        if fabric.rank == 0:
            dist.send(torch.tensor([2.0]), other, group=second)
        else:
            dist.recv(tensor, other, group=second)
        fabric.exchange(b"done")
        return tensor.item()

    assert in_fabrics(member, 2)["n1"] == 2.0


@EVERY_FABRIC
def test_a_name_may_be_given_to_other_ranks(kind: str) -> None:
    def member(fabric: Fabric, _board: Board, _name: str) -> float:
        total = torch.ones(1)
        for place in (1, 2, 1):
            group = dist.new_group([0, place])
            if fabric.rank in (0, place):
                dist.all_reduce(total, group=group)
            dist.destroy_process_group()
            dist.init_process_group("gloo")
        fabric.exchange(b"done")
        return total.item()

    assert list(in_fabrics(member, 3, kind=kind).values()) == [5.0, 5.0, 3.0]


@EVERY_FABRIC
def test_what_a_group_had_ends_with_it(kind: str) -> None:
    """Descriptors, threads, meshes, who is called back and what was told: for weeks."""

    def member(fabric: Fabric, board: Board, _name: str) -> list[tuple[int, ...]]:
        other, found = 1 - fabric.rank, []
        for turn in range(6):
            group = local_group([0, 1])
            tensor = torch.ones(3)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            work.wait()
            received = dist.irecv(torch.empty(3), other, group=group)
            dist.send(tensor, other, group=group)
            assert received is not None
            received.wait()
            dist.destroy_process_group(group)
            fabric.generation._errands.settle(10)
            fabric.exchange(b"done")
            found.append(held(fabric))
            board.put(f"{fabric.rank}/{turn}")
            board.get(f"{other}/{turn}")
        return found

    for found in in_fabrics(member, 2, kind=kind).values():
        assert found[1:] == [found[1]] * 5


def held(fabric: Fabric) -> tuple[int, ...]:
    wiring, world = fabric.wiring, fabric.present()
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        len(world.meshes),
        sum(len(peer.lanes) + len(peer.ahead) for peer in world.peers.values()),
        len(wiring._listener._subscribers),
        len(wiring._listener._parked),
        len(wiring.rendezvous._told),
    )


def test_a_destroyed_group_refuses_what_it_would_never_do() -> None:
    def member(fabric: Fabric, _board: Board, _name: str) -> None:
        group: Any = local_group([0, 1])
        dist.destroy_process_group(group)
        with pytest.raises(CallError, match="was destroyed"):
            group.allreduce([torch.ones(3)])
        with pytest.raises(CallError, match="was destroyed"):
            group.send([torch.ones(3)], 1 - fabric.rank, 0)

    in_fabrics(member, 2)


def test_what_follows_from_a_message_follows_also_when_its_group_is_destroyed() -> None:
    def member(fabric: Fabric, _board: Board, _name: str) -> None:
        group = local_group([0, 1])
        received = dist.irecv(torch.zeros(1), 1 - fabric.rank, group=group)
        assert received is not None
        followed = received.get_future().then(lambda _: torch.ones(1))
        dist.destroy_process_group(group)
        eventually(followed.done)

    in_fabrics(member, 2)
