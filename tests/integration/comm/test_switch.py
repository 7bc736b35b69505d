"""Worlds: prepared beside a running one, entered, given up, and what is left of them."""

from __future__ import annotations

import functools
import os
import pathlib
import select
import signal
import socket
import threading
from collections.abc import Callable
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
from support.eventually import eventually
from tmover.comm import intercept
from tmover.comm.fabric import Fabric, Mode
from tmover.core.events import Plan
from tmover.errors import Interrupted, LinkError, StateError

OLD, NEW = ["n0", "n1", "n2"], ["n0", "s0", "n2"]


def total(size: int = 3) -> float:
    """Return a sum over all ranks that is right only if each took part once."""
    tensor = torch.full((200_000,), float(10 ** dist.get_rank()))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, tensor[0].item()))
    assert tensor[0].item() == float("1" * size)
    return tensor[0].item()


def standby(board: Board, name: str = "s0", rank: int = 1) -> Fabric:
    """Return a fabric that has rehearsed a rank."""
    fabric = make_fabric(board, name)
    fabric.rehearse(rank, 3)
    intercept.install(fabric)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    return fabric


def cross(fabric: Fabric, plan: Plan, payload: bytes = b"") -> list[bytes]:
    fabric.prepare(plan, timeout_s=10)
    heard = fabric.barrier(plan.epoch, payload)
    fabric.commit(plan.epoch)
    return heard


def run_members(member: Callable[[Fabric, Board, str], Any], **others: Program) -> dict[str, Any]:
    """Run `member(fabric, board, name)` on the three ranks of a fresh world, beside others."""

    def body(board: Board, name: str) -> Any:
        fabric = join(board, name, OLD)
        total()
        result = member(fabric, board, name)
        leave(fabric)
        return result

    programs: dict[str, Program] = {name: functools.partial(body, name=name) for name in OLD}
    return {name: out.value for name, out in run({**programs, **others}).items()}


def test_links_are_opened_beside_running_collectives_and_to_the_joiner_only() -> None:
    """While a thread prepares, the main thread goes on reducing until all are prepared."""

    def member(fabric: Fabric, board: Board, name: str) -> Any:
        before, peers = fabric.links_opened, {id(peer) for peer in fabric.present().peers.values()}
        plan = make_plan(board, 2, NEW)
        thread = threading.Thread(target=fabric.prepare, args=(plan,), kwargs={"timeout_s": 10})
        thread.start()
        ready = torch.zeros(1)
        while not ready:
            total()
            ready[0] = 0 if thread.is_alive() else 1
            dist.all_reduce(ready, dist.ReduceOp.MIN)
        thread.join()
        opened = fabric.links_opened - before
        board.put(f"prepared/{name}")
        if name == "n1":
            board.get("committed")
            return opened
        fabric.barrier(2)
        fabric.commit(2)
        total()
        board.put("committed")
        kept = {id(peer) for peer in fabric.present().peers.values()} & peers
        assert len(kept) == 1
        fabric.release(2)
        total()
        return opened

    def joiner(board: Board) -> Any:
        fabric = standby(board)
        cross(fabric, make_plan(board, 2, NEW))
        total()
        total()
        leave(fabric)
        return fabric.links_opened

    found = run_members(member, s0=joiner)

    assert found == {"n0": 3, "n1": 0, "n2": 3, "s0": 6}  # control, votes, one group


def test_the_barrier_and_the_votes_carry_what_each_rank_says() -> None:
    def member(fabric: Fabric, board: Board, _name: str) -> list[bytes]:
        plan = make_plan(board, 2, OLD)
        fabric.prepare(plan, timeout_s=5)
        rank = fabric.rank
        heard = fabric.barrier(2, b"b%d" % rank * 50_000)
        assert heard == [b"b%d" % other * 50_000 for other in range(3)]
        fabric.commit(2)
        return fabric.exchange(b"v%d" % rank)

    found = run_members(member)

    assert found == {name: [b"v0", b"v1", b"v2"] for name in OLD}


def test_giving_up_a_prepared_world_leaves_the_old_one_as_it_was() -> None:
    def member(fabric: Fabric, board: Board, name: str) -> None:
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        board.put(f"prepared/{name}")
        for other in OLD:
            board.get(f"prepared/{other}")
        fabric.rollback(2)
        fabric.rollback(2)
        total()
        assert (fabric.mode, fabric.epoch) == (Mode.LIVE, 1)
        with pytest.raises(Interrupted, match="epoch 2"):
            fabric.prepare(make_plan(board, 2, NEW), timeout_s=1)
        with pytest.raises(StateError):
            fabric.commit(2)
        cross(fabric, make_plan(board, 3, OLD))
        total()

    def joiner(board: Board) -> None:
        fabric = standby(board)
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        for other in OLD:
            board.get(f"prepared/{other}")
        fabric.rollback(2)
        assert fabric.mode is Mode.SANDBOX
        dist.all_reduce(torch.ones(3))
        leave(fabric)

    run_members(member, s0=joiner)


def test_a_barrier_that_one_rank_has_entered_can_be_given_up() -> None:
    """What rank 0 said in the barrier lies unread before what it says next in epoch 1."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        meet(board, "prepared", name)
        if name == "n0":
            fabric.on_halfway = lambda _kind: board.put("entering")
            with pytest.raises(Interrupted):
                fabric.barrier(2)
            fabric.on_halfway = None
            board.put("out")
        else:
            board.get("out")
        fabric.rollback(2)
        total()
        assert fabric.exchange(b"v%d" % fabric.rank) == [b"v0", b"v1", b"v2"]
        board.put(f"done/{name}")

    def joiner(board: Board) -> None:
        fabric = standby(board)
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        board.get("entering")
        fabric.revoke(2, "a test says so")
        for name in OLD:
            board.get(f"done/{name}")
        leave(fabric)

    run_members(member, s0=joiner)


def test_a_world_revoked_past_its_barrier_is_entered_revoked() -> None:
    def member(fabric: Fabric, board: Board, name: str) -> None:
        fabric.prepare(make_plan(board, 2, OLD), timeout_s=10)
        fabric.barrier(2)
        meet(board, "passed", name)
        fabric.revoke(2, "late")
        fabric.commit(2)
        assert (fabric.epoch, fabric.mode) == (2, Mode.REVOKED)
        with pytest.raises(Interrupted):
            fabric.exchange(b"")

    run_members(member)


def test_a_joiner_that_dies_in_the_barrier_is_named_and_costs_nothing() -> None:
    def member(fabric: Fabric, board: Board, name: str) -> Any:
        accused: list[Any] = []
        fabric.on_broken = lambda epoch, peers, _reason: accused.append((epoch, peers))
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        board.put(f"prepared/{name}")
        if name != "n1":
            with pytest.raises((Interrupted, LinkError)):
                fabric.barrier(2)
        fabric.rollback(2)
        total()
        assert fabric.mode is Mode.LIVE
        return accused

    def joiner(board: Board) -> None:
        fabric = standby(board)
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        for name in OLD:
            board.get(f"prepared/{name}")
        os.kill(os.getpid(), signal.SIGKILL)

    found = run_members(member, s0=joiner)

    accusations = [(2, (uid_of("s0"),))]
    assert found["n1"] == []
    assert accusations in (found["n0"], found["n2"])
    assert all(found[name] in ([], accusations) for name in ("n0", "n2"))


def test_a_leaver_that_dies_while_others_stand_in_the_barrier_does_not_break_it() -> None:
    def member(fabric: Fabric, board: Board, name: str) -> Any:
        accused: list[Any] = []
        fabric.on_broken = lambda epoch, peers, _reason: accused.append((epoch, peers))
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        if name == "n1":
            board.put("leaver", os.getpid())
            board.get("entering/n0")
            board.get("entering/n2")
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.on_halfway = lambda _kind: board.put(f"entering/{name}")
        fabric.barrier(2)
        fabric.on_halfway = None
        fabric.commit(2)
        fabric.release(2)
        total()
        return accused

    def joiner(board: Board) -> None:
        fabric = standby(board)
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        leaver = os.pidfd_open(board.get("leaver"))
        assert select.select([leaver], [], [], 10)[0]
        os.close(leaver)
        fabric.barrier(2)
        fabric.commit(2)
        total()
        leave(fabric)

    found = run_members(member, s0=joiner)

    assert found["n0"] == found["n2"] == []


def test_a_joiner_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"

    def member(fabric: Fabric, board: Board, name: str) -> None:
        if name == "n1":
            return
        for epoch, joiner in ((2, "a0"), (3, "s0")):  # one is dialed, the other should dial
            board.put(f"endpoint/{joiner}", nobody)
            plan = make_plan(board, epoch, ["n0", joiner, "n2"])
            with pytest.raises(LinkError) as caught:
                fabric.prepare(plan, timeout_s=0.3)
            assert caught.value.peers == (uid_of(joiner),)
        board.put(f"tried/{name}")
        for other in ("n0", "n2"):
            board.get(f"tried/{other}")

    run_members(member)


@pytest.mark.parametrize("how", ["revoke", "rollback", "close"])
def test_preparing_ends_at_once_when_its_epoch_is_given_up(how: str) -> None:
    def member(fabric: Fabric, board: Board, name: str) -> None:
        if name == "n1":
            return
        board.put("endpoint/s0", mute)
        plan = make_plan(board, 2, NEW)
        ended = threading.Event()

        def prepare() -> None:
            with pytest.raises(Interrupted):
                fabric.prepare(plan, timeout_s=60)  # the joiner never answers
            ended.set()

        thread = threading.Thread(target=prepare)
        thread.start()
        while fabric.worlds.coming is None and not ended.is_set():
            torch.ones(10_000).sort()
        if how == "revoke":
            fabric.revoke(2, "given up")
        elif how == "rollback":
            fabric.rollback(2)
        else:
            fabric.close(bye=True)
        assert ended.wait(5)
        thread.join()

    with socket.create_server(("127.0.0.1", 0)) as server:
        mute = f"127.0.0.1:{server.getsockname()[1]}"
        run_members(member)


@pytest.mark.parametrize("cut", [True, False])
def test_links_between_survivors_can_be_opened_afresh(cut: bool) -> None:
    """The links of ranks 0 and 1 are cut, or only said to be; both go on over new ones."""

    def member(fabric: Fabric, board: Board, name: str) -> Any:
        accused: list[Any] = []
        fabric.on_broken = lambda epoch, peers, _reason: accused.append((epoch, peers))
        opened = fabric.links_opened
        meet(board, "ready", name)
        if name == "n0" and cut:
            for link in fabric.present().peers[1].lanes.values():
                link.sock.shutdown(socket.SHUT_RDWR)
        if name == "n0" and not cut:
            fabric.revoke(1, "a test says so")
        with pytest.raises((Interrupted, LinkError)):
            exchange_for_ever(fabric)
        meet(board, "broken", name)
        pair = (uid_of("n0"), uid_of("n1"))
        fabric.prepare(make_plan(board, 2, OLD), timeout_s=5, relink=[pair])
        fabric.barrier(2)
        fabric.commit(2)
        total()
        fabric.release(2)
        total()
        return fabric.links_opened - opened, accused

    found = run_members(member)

    assert [found[name][0] for name in OLD] == [3, 3, 0]
    accused = [found[name][1] for name in OLD]
    assert accused[0] in ([], [(1, (uid_of("n1"),))])
    assert accused[1] in ([], [(1, (uid_of("n0"),))])
    assert bool(accused[0] or accused[1]) is cut
    assert accused[2] == []


def meet(board: Board, what: str, name: str) -> None:
    """Return once all members have come here."""
    board.put(f"{what}/{name}")
    for other in OLD:
        board.get(f"{what}/{other}")


def exchange_for_ever(fabric: Fabric) -> None:
    while True:
        fabric.exchange(b"")


def test_groups_and_messages_reach_the_joiner() -> None:
    """Links of groups are opened with their first collective; the joiner's before that."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        groups = make_groups()
        use(groups[:1])
        dist.barrier()
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        if name == "n1":
            board.get("committed")
            return
        fabric.barrier(2)
        fabric.commit(2)
        board.put("committed")
        fabric.release(2)
        use([*groups, dist.new_group([0, 1, 2])])

    def joiner(board: Board) -> None:
        fabric = standby(board)
        groups = make_groups()
        cross(fabric, make_plan(board, 2, NEW))
        use([*groups, dist.new_group([0, 1, 2])])
        leave(fabric)

    def make_groups() -> list[Any]:
        return [dist.new_group([0, 1]), dist.new_group([1, 2])]

    def use(groups: list[Any]) -> None:
        rank = dist.get_rank()
        for group in groups:
            if dist.get_rank(group) >= 0:
                tensor = torch.ones(3)
                dist.all_reduce(tensor, group=group)
                assert tensor.tolist() == [float(dist.get_world_size(group))] * 3
        received = torch.zeros(1)
        sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % 3)
        dist.recv(received, (rank - 1) % 3)
        assert sent is not None
        sent.wait()
        assert received.item() == (rank - 1) % 3

    run_members(member, s0=joiner)


def test_groups_the_joiner_does_not_know_of_do_not_keep_it_out() -> None:
    def member(fabric: Fabric, board: Board, name: str) -> None:
        group = dist.new_group([0, 2])
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        known_here = dist.new_group([0, 1, 2])
        assert known_here is not None
        board.put(f"prepared/{name}")
        if name == "n1":
            board.get("prepared/n0")
            board.get("prepared/n2")
            return
        fabric.barrier(2)
        fabric.commit(2)
        total()
        dist.barrier(group)

    def joiner(board: Board) -> None:
        fabric = standby(board)
        group = dist.new_group([0, 1])
        assert group is not None
        cross(fabric, make_plan(board, 2, NEW))
        total()
        leave(fabric)

    run_members(member, s0=joiner)


def test_state_goes_over_a_socket_of_its_own_which_ends_with_its_epoch() -> None:
    def member(fabric: Fabric, board: Board, name: str) -> None:
        plan = make_plan(board, 2, NEW)
        fabric.prepare(plan, timeout_s=10)
        board.put(f"prepared/{name}")
        for other in OLD:
            board.get(f"prepared/{other}")
        if name != "n1":
            return
        joiner = plan.member(1)
        sock = fabric.connect_state(joiner.worker, joiner.endpoint, epoch=2, timeout_s=5)
        with sock:
            sock.sendall(b"state")
            assert sock.recv(2) == b"ok"
            threading.Timer(0, fabric.revoke, (2, "a test says so")).start()
            assert sock.recv(1) == b""
        with pytest.raises(Interrupted):
            fabric.accept_state(uid_of("n0"), epoch=2, timeout_s=5)

    def joiner(board: Board) -> None:
        fabric = standby(board)
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=10)
        with pytest.raises(TimeoutError):
            fabric.accept_state(uid_of("n0"), epoch=2, timeout_s=0.01)
        with fabric.accept_state(uid_of("n1"), epoch=2, timeout_s=5) as sock:
            assert sock.recv(5) == b"state"
            sock.sendall(b"ok")
            assert sock.recv(1) == b""
        leave(fabric)

    run_members(member, s0=joiner)


def test_nothing_is_left_of_a_closed_fabric() -> None:
    def things() -> tuple[set[str], int]:
        threads = {thread.name for thread in threading.enumerate()}
        return threads, len(list(pathlib.Path("/proc/self/fd").iterdir()))

    def body(board: Board, name: str) -> None:
        before = things()
        fabric = join(board, name, OLD)
        total()
        after, ahead = (fabric.rank + 1) % 3, (fabric.rank - 1) % 3
        sent = dist.isend(torch.ones(1), after)
        dist.recv(torch.ones(1), ahead)
        assert sent is not None
        sent.wait()
        pending = dist.all_reduce(torch.ones(5), async_op=True)
        assert pending is not None
        pending.wait()
        cross(fabric, make_plan(board, 2, OLD))
        fabric.prepare(make_plan(board, 3, OLD), timeout_s=5)
        fabric.exchange(b"done")
        leave(fabric)
        fabric.close(bye=True)
        assert things() == before

    run({name: functools.partial(body, name=name) for name in OLD})


def test_moves_that_are_given_up_leave_nothing_behind() -> None:
    def count() -> int:
        return len(list(pathlib.Path("/proc/self/fd").iterdir()))

    def member(fabric: Fabric, board: Board, name: str) -> None:
        for epoch in range(2, 22):
            plan = make_plan(board, epoch, NEW)
            fabric.prepare(plan, timeout_s=10)
            meet(board, f"prepared/{epoch}", name)
            board.get(f"prepared/{epoch}/s0")
            fabric.rollback(epoch)
            meet(board, f"over/{epoch}", name)
            if epoch == 2:
                before = count()
        assert eventually(lambda: count() <= before, timeout_s=10)
        total()

    def joiner(board: Board) -> None:
        fabric = standby(board)
        before = count()
        for epoch in range(2, 22):
            fabric.prepare(make_plan(board, epoch, NEW), timeout_s=10)
            board.put(f"prepared/{epoch}/s0")
            for name in OLD:
                board.get(f"prepared/{epoch}/{name}")
            fabric.rollback(epoch)
        assert eventually(lambda: count() <= before, timeout_s=10)
        leave(fabric)

    run_members(member, s0=joiner)


def test_a_forked_child_holds_no_link_open() -> None:
    """Rank 1 dies while a process it forked, as a data loader does, lives on."""
    until_the_end, end = os.pipe()

    def member(fabric: Fabric, board: Board, name: str) -> None:
        if name == "n1":
            if os.fork() == 0:
                board.close()
                os.close(end)
                os.read(until_the_end, 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        accused: list[str] = []
        fabric.on_broken = lambda _epoch, _peers, reason: accused.append(reason)
        with pytest.raises((Interrupted, LinkError)):
            exchange_for_ever(fabric)
        assert not any("nothing from" in reason for reason in accused)  # the deadline

    try:
        run_members(member)
    finally:
        os.close(end)
        os.close(until_the_end)
