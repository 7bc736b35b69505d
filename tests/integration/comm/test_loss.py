"""A rank dies, stops, or is cut off while all are in the middle of something: the others go on.

What the links themselves cannot see (a process that is stopped: its kernel answers for it) is told
to one rank, as the controller does it; from there it reaches all over the links.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist

from integration.comm import harness
from integration.comm.harness import Board, Program, join, leave, make_plan, run, uid_of
from support.eventually import eventually
from support.machines import Machines, cannot_make
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.timeouts import Timeouts
from tmover.errors import Interrupted, LinkError

NAMES = ["n0", "n1", "n2", "n3"]
VICTIM = 2
SURVIVORS = [rank for rank in range(len(NAMES)) if rank != VICTIM]
QUICK = dataclasses.replace(harness.TIMEOUTS, idle_s=1, interval_s=1, probes=1, unacked_s=1.5)
"""So that a test is short; what is noticed does not depend on it."""
LARGE = 1_000_000
Blocked = Callable[[Fabric], None]


# --- in the middle of what ------------------------------------------------------------------------


def reduce_large(_fabric: Fabric) -> None:
    while True:
        dist.all_reduce(torch.ones(LARGE))


def reduce_small(_fabric: Fabric) -> None:
    while True:
        dist.all_reduce(torch.ones(3))


def vote(fabric: Fabric) -> None:
    while True:
        fabric.exchange(b"good")


def receive(fabric: Fabric) -> None:
    dist.recv(torch.ones(3), (fabric.rank + 1) % len(NAMES))


def stand_in_barrier(fabric: Fabric) -> None:
    """All but one stand in the barrier of a coming world; that one is busy in the present."""
    if fabric.rank == VICTIM:
        dist.recv(torch.ones(3), 0)
    else:
        fabric.barrier(2)


PLACES = [reduce_large, reduce_small, vote, receive, stand_in_barrier]


# --- what the ranks do ----------------------------------------------------------------------------


class Told:
    """A word from outside of the links to rank 0: a pipe that was there before the fork."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def say(self) -> None:
        os.write(self._write, b"!")

    def revoke_when_told(self, fabric: Fabric) -> None:
        def wait() -> None:
            os.read(self._read, 1)
            fabric.revoke(1, "the controller says so")
            fabric.revoke(2, "the controller says so")

        threading.Thread(target=wait, daemon=True).start()

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


def member(board: Board, rank: int, blocked: Blocked, told: Told, machines: Machines | None) -> Any:
    """Be in the middle of something until it is over; return whom this rank accused."""
    address = "127.0.0.1"
    if machines is not None:
        machines.enter(rank)
        address = machines.addresses[rank]
    accused: list[str] = []
    fabric = join(board, NAMES[rank], NAMES, address=address, timeouts=QUICK)
    fabric.on_broken = lambda _epoch, peers, _reason: accused.extend(peers)
    if rank == 0:
        told.revoke_when_told(fabric)
    dist.all_reduce(torch.ones(3))
    if blocked is stand_in_barrier:
        fabric.prepare(make_plan(board, 2, NAMES), timeout_s=10)
    board.put(f"in/{rank}", os.getpid())
    with pytest.raises((Interrupted, LinkError)):
        blocked(fabric)
    assert_over(fabric)
    board.put(f"over/{rank}")
    for other in SURVIVORS:
        board.get(f"over/{other}")  # nobody's end is what the others saw
    leave(fabric)
    return accused


def assert_over(fabric: Fabric) -> None:
    """Check that whatever comes later ends at once, too.

    In a barrier the coming world may be seen to break before the present one.
    """
    eventually(lambda: fabric.mode is Mode.REVOKED, timeout_s=harness.DEADLINE_S)
    with pytest.raises(Interrupted):
        fabric.exchange(b"")
    with pytest.raises(Interrupted):
        dist.all_reduce(torch.ones(3))
    fabric.attempt_open = True
    dist.all_reduce(torch.ones(LARGE))
    dist.recv(torch.ones(3), 0 if fabric.rank else 1)
    fabric.quiesce()


class Scene(NamedTuple):
    """What can be done to whom."""

    board: Board
    pid: int
    machines: Machines | None
    told: Told

    def until_over(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.board.get(f"over/{rank}")


def act(
    harm: Callable[[Scene], None], blocked: Blocked, told: Told, machines: Machines | None = None
) -> list[set[str] | None]:
    """Do harm to a rank while all are blocked; return whom each rank accused, None if it died."""

    def harming(board: Board) -> None:
        pids = [board.get(f"in/{rank}") for rank in range(len(NAMES))]
        harm(Scene(board, pids[VICTIM], machines, told))

    programs: dict[str, Program] = {
        name: functools.partial(member, rank=rank, blocked=blocked, told=told, machines=machines)
        for rank, name in enumerate(NAMES)
    }
    outcomes = run({**programs, "harm": harming})
    values = [outcomes[name].value for name in NAMES]
    return [None if accused is None else set(accused) for accused in values]


def assert_blamed(accused: list[set[str] | None]) -> None:
    """Check that the survivors, all together, accuse the victim and nobody else."""
    said = [accused[rank] or set() for rank in SURVIVORS]
    assert set().union(*said) == {uid_of(NAMES[VICTIM])}


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocked", PLACES)
def test_a_killed_process_is_noticed_by_all(blocked: Blocked, told: Told) -> None:
    accused = act(lambda scene: os.kill(scene.pid, signal.SIGKILL), blocked, told)

    assert_blamed(accused)
    assert accused[VICTIM] is None


@pytest.mark.parametrize("blocked", PLACES)
def test_a_stopped_process_keeps_nobody_from_hearing_that_it_is_over(
    blocked: Blocked, told: Told
) -> None:
    """One rank is told. The one that is stopped hears it as well, as soon as it can."""

    def stop(scene: Scene) -> None:
        os.kill(scene.pid, signal.SIGSTOP)
        scene.told.say()
        scene.until_over(SURVIVORS)
        os.kill(scene.pid, signal.SIGCONT)
        scene.until_over([VICTIM])

    act(stop, blocked, told)


# --- machines -------------------------------------------------------------------------------------


@pytest.fixture
def machines() -> Iterator[Machines]:
    why = cannot_make()
    if why:
        pytest.skip(why)
    with Machines(len(NAMES)) as made:
        yield made


def cut(scene: Scene) -> None:
    assert scene.machines is not None
    scene.machines.cut(VICTIM)


def lose_route(scene: Scene) -> None:
    assert scene.machines is not None
    scene.machines.lose_route(VICTIM, *SURVIVORS)


@pytest.mark.parametrize("harm", [cut, lose_route])
@pytest.mark.parametrize("blocked", PLACES)
def test_a_machine_that_cannot_be_reached_is_noticed_by_all_and_notices_it_itself(
    harm: Callable[[Scene], None], blocked: Blocked, told: Told, machines: Machines
) -> None:
    accused = act(harm, blocked, told, machines)

    assert_blamed(accused)
    assert accused[VICTIM] or harm is lose_route  # it may be told by those it still hears


@pytest.mark.parametrize("blocked", PLACES)
def test_a_machine_that_comes_back_without_its_connections_is_noticed_by_all(
    blocked: Blocked, told: Told, machines: Machines
) -> None:
    def vanish(scene: Scene) -> None:
        assert scene.machines is not None
        scene.machines.power_off(VICTIM)
        os.kill(scene.pid, signal.SIGKILL)
        scene.machines.boot_again(VICTIM)

    accused = act(vanish, blocked, told, machines)

    assert_blamed(accused)
    assert accused[VICTIM] is None


def test_a_revocation_reaches_whom_the_revoker_cannot_reach(machines: Machines) -> None:
    """No link is found broken here: nobody waits for that in this test."""
    patient = dataclasses.replace(harness.TIMEOUTS, idle_s=1000, unacked_s=1000.0)

    def waiting(board: Board, rank: int) -> Any:
        machines.enter(rank)
        accused: list[str] = []
        address = machines.addresses[rank]
        fabric = join(board, NAMES[rank], NAMES, address=address, timeouts=patient)
        fabric.on_broken = lambda _epoch, peers, _reason: accused.extend(peers)
        dist.all_reduce(torch.ones(3))
        board.put(f"in/{rank}")
        if rank == 0:
            board.get("apart")
            fabric.revoke(1, "a test says so")
        else:
            with pytest.raises(Interrupted, match="revoked"):
                fabric.exchange(b"")
        board.put(f"over/{rank}")
        for other in range(len(NAMES)):
            board.get(f"over/{other}")
        leave(fabric)
        return accused

    def part(board: Board) -> None:
        for rank in range(len(NAMES)):
            board.get(f"in/{rank}")
        machines.lose_route(0, VICTIM)
        machines.lose_route(VICTIM, 0)
        board.put("apart")

    programs: dict[str, Program] = {
        name: functools.partial(waiting, rank=rank) for rank, name in enumerate(NAMES)
    }
    outcomes = run({**programs, "part": part})

    assert [outcomes[name].value for name in NAMES] == [[]] * len(NAMES)


def test_a_slow_link_is_not_taken_for_a_dead_one(machines: Machines) -> None:
    """One exchange takes longer than a link may stay silent before it counts as broken."""
    volume, rate = 1_000_000, "2mbit"

    def reducing(board: Board, rank: int) -> Any:
        machines.enter(rank)
        accused: list[str] = []
        address = machines.addresses[rank]
        usual = dataclasses.replace(Timeouts(), collective_s=20.0)
        fabric = join(board, NAMES[rank], NAMES, address=address, timeouts=usual)
        fabric.on_broken = lambda _epoch, peers, _reason: accused.extend(peers)
        board.put(f"in/{rank}")
        board.get("slow")
        row = torch.full((volume // 4,), float(10**rank))
        dist.all_reduce(row)
        assert row.eq(1111.0).all()
        assert fabric.exchange(b"good") == [b"good"] * len(NAMES)
        leave(fabric)
        return accused

    def slow_down(board: Board) -> None:
        for rank in range(len(NAMES)):
            board.get(f"in/{rank}")
        machines.slow_down(VICTIM, rate)
        board.put("slow")

    programs: dict[str, Program] = {
        name: functools.partial(reducing, rank=rank) for rank, name in enumerate(NAMES)
    }
    outcomes = run({**programs, "slow": slow_down})

    assert [outcomes[name].value for name in NAMES] == [[]] * len(NAMES)
