"""A swap opens what the leaver's links carried, to the joiner, and nothing else."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import (
    Board,
    Program,
    join,
    leave,
    make_fabric,
    make_plan,
    run,
    uid_of,
)
from tmover.comm import intercept
from tmover.comm.collectives import DIRECT_BYTES
from tmover.comm.fabric import Fabric

OLD = ["n0", "n1", "n2", "n3"]
LEAVER = 1
LONG, SHORT = DIRECT_BYTES // 4 + 8, 8


class Groups:
    """The groups of a script, by what it calls them, and what is sent in each."""

    def __init__(self) -> None:
        self.ring: Any = dist.group.WORLD
        self.pair: Any = dist.new_group([1, 3])
        self.apart: Any = dist.new_group([0, 2])
        self.idle: Any = dist.new_group([0, 1, 2, 3])
        self.posts: Any = dist.new_group([0, 1, 2, 3])

    def work(self) -> None:
        """Reduce around the ring, in the two pairs, and send from each rank to the next."""
        rank = dist.get_rank()
        long = torch.full((LONG,), float(10**rank))
        dist.all_reduce(long)
        assert long[0] == long[-1] == 1111
        short = torch.full((SHORT,), float(rank))
        dist.all_reduce(short, group=self.pair if rank % 2 else self.apart)
        assert short[0] == (4 if rank % 2 else 2)
        heard = torch.zeros(1)
        sent = dist.isend(torch.full((1,), float(rank)), (rank + 1) % 4, group=self.posts)
        dist.recv(heard, (rank - 1) % 4, group=self.posts)
        assert sent is not None
        sent.wait()
        assert heard == (rank - 1) % 4

    def called(self, name: str) -> str:
        """Return what the script calls the group that torch calls `name`."""
        names = {getattr(group, "group_name", None): own for own, group in vars(self).items()}
        return names.get(name, name)


def lanes(fabric: Fabric, groups: Groups, rank: int) -> set[tuple[str, str]]:
    peer = fabric.present().peers.get(rank)
    if peer is None:
        return set()
    return {(groups.called(lane.group), lane.use) for lane in {**peer.lanes, **peer.ahead}}


def everything(fabric: Fabric, groups: Groups) -> dict[int, set[tuple[str, str]]]:
    return {rank: lanes(fabric, groups, rank) for rank in range(4) if rank != fabric.rank}


WORLD = {("", "vote"), ("", "control")}


def member(board: Board, name: str, new: list[str]) -> Any:
    """Work before and after the swap; return what was open when."""
    fabric = join(board, name, OLD)
    groups = Groups()
    groups.work()
    before, opened = everything(fabric, groups), fabric.links_opened
    links = {
        (rank, lane): link
        for rank, peer in fabric.present().peers.items()
        for lane, link in peer.lanes.items()
    }
    fabric.prepare(make_plan(board, 2, new), timeout_s=10)
    if name == OLD[LEAVER]:
        board.get("crossed")
        leave(fabric)
        return before
    fabric.barrier(2)
    prepared = fabric.links_opened - opened
    fabric.commit(2)
    ahead = lanes(fabric, groups, LEAVER)
    groups.work()
    after, in_all = everything(fabric, groups), fabric.links_opened - opened
    fabric.exchange(b"all have worked")
    board.put("crossed")
    for (rank, lane), link in links.items():
        assert rank == LEAVER or fabric.present().peers[rank].lanes[lane] is link
    fabric.release(2)
    groups.work()
    leave(fabric)
    return before, ahead, after, prepared, in_all


def joining(board: Board, name: str, new: list[str]) -> Any:
    fabric = make_fabric(board, name)
    fabric.rehearse(LEAVER, 4)
    intercept.install(fabric)
    dist.init_process_group("gloo")
    groups = Groups()
    fabric.prepare(make_plan(board, 2, new), timeout_s=20)
    fabric.barrier(2)
    fabric.commit(2)
    groups.work()
    found = everything(fabric, groups)
    fabric.exchange(b"all have worked")
    groups.work()
    leave(fabric)
    return found


@pytest.mark.parametrize("joiner", ["s0", "a0"])
def test_only_what_the_leavers_links_carried_is_opened(joiner: str) -> None:
    """The joiner's uid is the greatest in one run, the least in the other."""
    new = ["n0", joiner, "n2", "n3"]
    programs: dict[str, Program] = {
        name: functools.partial(member, name=name, new=new) for name in OLD
    }
    programs[joiner] = functools.partial(joining, name=joiner, new=new)
    found = {name: out.value for name, out in run(programs).items()}

    ring = {("ring", "data")}
    assert found["n1"][0] == WORLD | ring | {("posts", "received")}
    assert found["n1"][2] == WORLD | ring | {("posts", "message")}
    assert found["n1"][3] == WORLD | {("pair", "data")}
    assert found[joiner] == found["n1"]
    expected = {
        "n0": (WORLD | ring | {("posts", "message")}, set()),
        "n2": (WORLD | ring, {("posts", "received")}),
        "n3": (WORLD | {("pair", "data")}, set()),
    }
    for name, (ahead, later) in expected.items():
        before, opened, after, prepared, in_all = found[name]
        assert opened == ahead, name
        assert before == after, name
        assert after[LEAVER] == ahead | later, name
        assert prepared == len(ahead), name
        assert in_all == len(ahead | later), name
    assert found["n0"][0][2] == WORLD | {("apart", "data")}  # opposite in the ring: no link of it


def test_a_link_that_both_ends_foresaw_is_opened_once_by_relinking() -> None:
    def both(board: Board, name: str) -> int:
        fabric = join(board, name, ["n0", "n1"])
        dist.all_reduce(torch.ones(SHORT))
        opened = fabric.links_opened
        pair = (uid_of("n0"), uid_of("n1"))
        fabric.prepare(make_plan(board, 2, ["n0", "n1"]), timeout_s=5, relink=[pair])
        fabric.barrier(2)
        fabric.commit(2)
        ones = torch.ones(SHORT)
        dist.all_reduce(ones)
        assert ones[0] == 2
        fabric.exchange(b"done")
        fabric.release(2)
        opened = fabric.links_opened - opened
        leave(fabric)
        return opened

    names = ["n0", "n1"]
    found = run({name: functools.partial(both, name=name) for name in names})

    assert [found[name].value for name in names] == [3, 3]
