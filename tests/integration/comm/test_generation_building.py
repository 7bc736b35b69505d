"""A communicator is built beside the training, and something comes between."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from torch import distributed as dist

from integration.comm.harness import Board, leave, make_plan, uid_of
from integration.comm.stocked import (
    NEW,
    OLD,
    PATIENT,
    cross,
    enter,
    inner_of,
    run_members,
    standby,
    total,
)
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.generation import Generation
from tmover.comm.stock import Gloo, GlooStock
from tmover.comm.store import GroupStore
from tmover.errors import Interrupted, LinkError


class Waiting(GlooStock):
    """Builds nothing: says so, and waits for what never comes."""

    def __init__(self, board: Board) -> None:
        super().__init__("127.0.0.1")
        self._board = board

    def build(self, store: GroupStore, rank: int, size: int, *, timeout_s: float) -> Gloo:
        self._board.put("waiting")
        store.wait(["what nobody sets"])
        raise AssertionError


def with_stock(fabric: Fabric, stock: GlooStock) -> Generation:
    """Return communicators that come from this stock, as if all ranks' group were in use."""
    made = Generation({"cpu": stock}, fabric.wiring, fabric.timeouts)
    world: Any = dist.group.WORLD
    made.carries(world.group_name, "cpu")
    return made


def give_up_halfway(fabric: Fabric, board: Board, name: str) -> None:
    plan = make_plan(board, 2, NEW)
    ended = threading.Event()

    def prepare() -> None:
        with pytest.raises((Interrupted, LinkError)):  # the latter if others have given up first
            fabric.prepare(plan, timeout_s=60)
        ended.set()

    thread = threading.Thread(target=prepare)
    if name != "n1":
        thread.start()
    board.get("waiting")
    assert total() == 111
    if name != "n1":
        fabric.rollback(2)
        assert ended.wait(60)
        thread.join()
    board.put(f"over/{name}")


def test_a_move_that_is_given_up_while_it_builds_leaves_everything_as_it_was() -> None:
    """The joiner builds nothing until all have given up; in the next move it does."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        assert total() == 111
        before = inner_of(fabric)
        give_up_halfway(fabric, board, name)
        assert total() == 111
        assert inner_of(fabric) is before
        fabric.prepare(make_plan(board, 3, NEW), timeout_s=20)
        if name == "n1":
            board.get("passed/n0")
            board.get("passed/n2")
            return
        enter(fabric, 3)
        assert total() == 111
        board.put(f"passed/{name}")
        fabric.release(3)
        assert total() == 111

    def joiner(board: Board) -> None:
        fabric = standby(board, timeouts=PATIENT)
        own, fabric.generation = fabric.generation, with_stock(fabric, Waiting(board))
        with pytest.raises((Interrupted, LinkError)):
            fabric.prepare(make_plan(board, 2, NEW), timeout_s=60)
        for name in OLD:
            board.get(f"over/{name}")
        fabric.generation = own
        cross(fabric, board, 3, NEW)
        assert total() == 111
        assert total() == 111
        leave(fabric)

    run_members(member, {"s0": joiner}, timeouts=PATIENT)


class Dying(GlooStock):
    """Dies when it is to build: at once, or when it has said where it listens."""

    def __init__(self, *, published: bool) -> None:
        super().__init__("127.0.0.1")
        self._published = published

    def build(self, store: GroupStore, rank: int, size: int, *, timeout_s: float) -> Gloo:
        if self._published:
            super().build(_Cliff(store), rank, size, timeout_s=timeout_s)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class _Cliff(GroupStore):
    """A store in which one may set values, and dies when one waits."""

    def __init__(self, store: GroupStore) -> None:
        dist.Store.__init__(self)
        self._store = store

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("published", [False, True])
def test_a_joiner_that_dies_while_it_builds_is_named_and_training_goes_on(published: bool) -> None:
    def member(fabric: Fabric, board: Board, name: str) -> None:
        assert total() == 111
        before = inner_of(fabric)
        if name != "n1":
            with pytest.raises(LinkError) as caught:
                fabric.prepare(make_plan(board, 2, NEW), timeout_s=20)
            assert caught.value.peers == (uid_of("s0"),)
        assert total() == 111
        assert (fabric.mode, fabric.epoch) == (Mode.LIVE, 1)
        assert inner_of(fabric) is before
        cross(fabric, board, 3, OLD)
        assert inner_of(fabric) is before
        assert total() == 111

    def joiner(board: Board) -> None:
        fabric = standby(board)
        fabric.generation = with_stock(fabric, Dying(published=published))
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=20)

    found = run_members(member, {"s0": joiner})

    assert found["s0"].status == -signal.SIGKILL


class Failing(GlooStock):
    """Cannot build anything the first time."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._failed = False

    def build(self, store: GroupStore, rank: int, size: int, *, timeout_s: float) -> Gloo:
        if not self._failed:
            self._failed = True
            msg = "a test says so"
            raise LinkError(msg)
        return super().build(store, rank, size, timeout_s=timeout_s)


def test_what_could_not_be_built_ahead_is_built_when_it_is_used() -> None:
    """One rank fails; the others, whose connections then fail, find the same out together."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        assert total() == 111
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=20)
        assert fabric.generation.inners(2) == {}  # nobody is beyond the barrier yet
        if name == "n1":
            board.get("passed/n0")
            board.get("passed/n2")
            return
        enter(fabric, 2)
        assert total() == 111
        board.put(f"passed/{name}")
        fabric.release(2)
        assert total() == 111

    def joiner(board: Board) -> None:
        fabric = standby(board)
        fabric.generation = with_stock(fabric, Failing("127.0.0.1"))
        cross(fabric, board, 2, NEW)
        assert total() == 111
        assert total() == 111
        leave(fabric)

    run_members(member, {"s0": joiner})
