"""Ranks are killed inside large collectives; what they left in the links reaches nobody."""

from __future__ import annotations

import functools
import os
import random
import select
import signal
import socket
import threading
import time
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
)
from tmover.comm import intercept
from tmover.comm.fabric import Fabric
from tmover.comm.link import Link
from tmover.errors import Interrupted, LinkError

SIZE = 3
ROUNDS = 5
COUNT = 1_500_000
NOTHING = memoryview(b"")


def holders(round_: int, seed: int) -> tuple[list[str], int]:
    """Return who holds the ranks in a round, and which rank dies in it."""
    chance = random.Random(seed)
    names = [f"n{rank}" for rank in range(SIZE)]
    for number in range(round_):
        names[chance.randrange(SIZE)] = f"s{number}"
    return names, chance.randrange(SIZE)


def die_after(frames: int) -> None:
    """Kill this process in the middle of the frame with this number."""
    left = [frames]
    real = Link.put

    def put(link: Link, head: bytes, body: memoryview = NOTHING) -> bool:
        left[0] -= 1
        if left[0] == 0:
            link.sock.send(head + bytes(body[: len(body) // 2]))
            os.kill(os.getpid(), signal.SIGKILL)
        return real(link, head, body)

    setattr(Link, "put", put)  # noqa: B010 - a method is not to be assigned to, says mypy


def reduce_exactly(round_: int) -> None:
    """Check sums that are right only if every byte of every rank arrived in its place."""
    for count in (100, 30_000, COUNT):
        tensor = (torch.arange(count) % 1000 + dist.get_rank() * (round_ + 1)).float()
        dist.all_reduce(tensor)
        wanted = SIZE * (torch.arange(count) % 1000) + sum(range(SIZE)) * (round_ + 1)
        assert torch.equal(tensor, wanted.float())


def serve(fabric: Fabric, board: Board, name: str, seed: int, *, since: int) -> int:
    """Take part from round `since` on; return how many links were opened."""
    for round_ in range(since, ROUNDS + 1):
        epoch = round_ + 1
        names, victim = holders(round_, seed)
        if round_ > 0:
            fabric.prepare(make_plan(board, epoch, names), timeout_s=10)
            fabric.barrier(epoch)
            fabric.commit(epoch)
            fabric.release(epoch)
        reduce_exactly(round_)
        if round_ == ROUNDS:
            break
        fabric.attempt_open = True
        if names[victim] == name:
            die_after(random.Random(seed + round_).randrange(2, 40))
        for _ in range(20):
            dist.all_reduce(torch.ones(COUNT))
        with pytest.raises(Interrupted):
            fabric.exchange(b"good")
        fabric.quiesce()
        fabric.attempt_open = False
    fabric.exchange(b"done")
    return fabric.links_opened


def member(board: Board, name: str, seed: int) -> Any:
    fabric = join(board, name, holders(0, seed)[0])
    opened = serve(fabric, board, name, seed, since=0)
    leave(fabric)
    return opened


def joiner(board: Board, name: str, seed: int) -> Any:
    number = int(name[1:])
    names, _ = holders(number + 1, seed)
    fabric = make_fabric(board, name)
    fabric.rehearse(names.index(name), SIZE)
    intercept.install(fabric)
    dist.init_process_group()
    opened = serve(fabric, board, name, seed, since=number + 1)
    leave(fabric)
    return opened


@pytest.mark.parametrize("seed", [1, 2])
def test_survivors_go_on_over_their_links_with_a_joiner(seed: int) -> None:
    programs: dict[str, Program] = {
        f"n{rank}": functools.partial(member, name=f"n{rank}", seed=seed) for rank in range(SIZE)
    }
    for number in range(ROUNDS):
        name = f"s{number}"
        programs[name] = functools.partial(joiner, name=name, seed=seed)

    outcomes = run(programs)

    alive = set(holders(ROUNDS, seed)[0])
    assert {name for name, outcome in outcomes.items() if outcome.status == 0} == alive
    for name in alive:
        rounds = ROUNDS if name.startswith("n") else ROUNDS - int(name[1:]) - 1
        assert outcomes[name].value == 3 * (SIZE - 1 + rounds)  # one joiner a round, none else


def test_what_was_sent_to_a_rank_that_never_took_part_is_padded_out_and_discarded() -> None:
    """Rank 2 is stuck in a frame to rank 0, which does not read, when rank 1 dies."""
    names, after = ["n0", "n1", "n2"], ["n0", "s0", "n2"]
    count = 6 * COUNT

    def member(board: Board, name: str) -> Any:
        fabric = join(board, name, names)
        dist.barrier()
        fabric.attempt_open = True
        if name == "n1":
            board.get("stuck")
            os.kill(os.getpid(), signal.SIGKILL)
        mesh = fabric.present().meshes[_group()]
        if name == "n2":
            link = mesh.link(0)
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            watcher = threading.Thread(target=report_stuck, args=(link, board))
            watcher.start()
            dist.all_reduce(torch.ones(count))  # sends to rank 0, waits for rank 1
            watcher.join()
            assert link._pad > 0
        else:
            mesh.link(2).sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            board.get("stuck")
            with pytest.raises((Interrupted, LinkError)):
                fabric.exchange(b"never heard of")
        fabric.attempt_open = False
        go_on(fabric, board)
        return True

    def joiner(board: Board) -> Any:
        fabric = make_fabric(board, "s0")
        fabric.rehearse(1, SIZE)
        intercept.install(fabric)
        dist.init_process_group()
        go_on(fabric, board)
        return True

    programs: dict[str, Program] = {name: functools.partial(member, name=name) for name in names}
    outcomes = run({**programs, "s0": joiner})

    assert [outcomes[name].value for name in after] == [True] * 3


def go_on(fabric: Fabric, board: Board) -> None:
    fabric.prepare(make_plan(board, 2, ["n0", "s0", "n2"]), timeout_s=10)
    fabric.barrier(2)
    fabric.commit(2)
    for _ in range(2):
        reduce_exactly(0)
    fabric.exchange(b"done")
    leave(fabric)


def report_stuck(link: Link, board: Board) -> None:
    """Tell the board once the link has half a frame to send and the socket takes no more."""
    deadline = time.monotonic() + 10
    ready = select.poll()
    ready.register(link.fd, select.POLLOUT)
    while time.monotonic() < deadline:
        if len(link._body_out) and not ready.poll(1):
            board.put("stuck")
            return
        time.sleep(0.001)


def _group() -> str:
    group: Any = dist.group.WORLD
    name: str = group.group_name
    return name
