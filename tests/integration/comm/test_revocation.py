"""What blocked ranks, pending works and user code see when a world is revoked."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from integration.comm.harness import Board, Program, join, leave, run
from tmover.comm.fabric import Fabric, Mode
from tmover.errors import Interrupted, LinkError

NAMES = ["n0", "n1", "n2"]
LARGE = 4_000_000


def run_ranks(*programs: Any) -> list[Any]:
    """Run `program(fabric, board)` on each rank of a fresh world."""

    def rank_program(name: str, program: Any) -> Program:
        def body(board: Board) -> Any:
            fabric = join(board, name, NAMES[: len(programs)])
            dist.barrier()
            result = program(fabric, board)
            leave(fabric)
            return result

        return body

    named = zip(NAMES, programs, strict=False)
    outcomes = run({name: rank_program(name, program) for name, program in named})
    return [outcome.value for outcome in outcomes.values()]


def exchange_for_ever(fabric: Fabric) -> None:
    while True:
        fabric.exchange(b"")


def test_one_rank_that_revokes_wakes_all_without_a_controller() -> None:
    """Ranks 0 and 1 wait for each other and for rank 2, in different collectives and groups."""

    def blocked(fabric: Fabric, board: Board) -> str:
        board.put(f"blocked/{fabric.rank}")
        with pytest.raises(Interrupted) as caught:
            dist.all_reduce(torch.ones(LARGE if fabric.rank else 3))
        assert fabric.mode is Mode.REVOKED
        board.put(f"awake/{fabric.rank}")
        board.get(f"awake/{1 - fabric.rank}")  # before anybody leaves: nobody saw a link break
        return str(caught.value)

    def revoking(fabric: Fabric, board: Board) -> None:
        for rank in (0, 1):
            board.get(f"blocked/{rank}")
        fabric.revoke(1, "a test says so")
        for rank in (0, 1):
            board.get(f"awake/{rank}")

    reasons = run_ranks(blocked, blocked, revoking)

    assert all("revoked" in reason for reason in reasons[:2])


def test_hearsay_is_passed_on_but_accuses_nobody() -> None:
    def hearing(fabric: Fabric, board: Board) -> list[Any]:
        accused: list[Any] = []
        fabric.on_broken = lambda *observed: accused.append(observed)
        board.put(f"hearing/{fabric.rank}")
        with pytest.raises(Interrupted):
            fabric.exchange(b"")
        board.put(f"awake/{fabric.rank}")
        return accused

    def revoking(fabric: Fabric, board: Board) -> list[Any]:
        for rank in (0, 1):
            board.get(f"hearing/{rank}")
        fabric.revoke(1, "a test says so")
        for rank in (0, 1):
            board.get(f"awake/{rank}")
        return []

    assert run_ranks(hearing, hearing, revoking) == [[], [], []]


def test_a_death_is_seen_by_all_and_accused_once_each() -> None:
    def surviving(fabric: Fabric, board: Board) -> list[Any]:
        seen: list[Any] = []
        known = threading.Event()

        def note(epoch: int, peers: tuple[str, ...], _reason: str) -> None:
            seen.append((epoch, peers))
            known.set()

        fabric.on_broken = note
        with pytest.raises((Interrupted, LinkError)):
            exchange_for_ever(fabric)
        assert known.wait(5)  # hearsay may have come first: it still looks for itself
        board.put(f"seen/{fabric.rank}")
        for rank in (0, 1):
            board.get(f"seen/{rank}")
        return seen

    def dying(fabric: Fabric, _board: Board) -> None:
        fabric.exchange(b"")
        os.kill(os.getpid(), signal.SIGKILL)

    found = run_ranks(surviving, surviving, dying)

    assert found[:2] == [[(1, ("n2-0000/0",))]] * 2


def test_inside_an_attempt_tensor_collectives_end_and_object_collectives_raise() -> None:
    def attempting(fabric: Fabric, board: Board) -> None:
        fabric.attempt_open = True
        pending = [dist.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(3)]
        messages = [dist.isend(torch.ones(LARGE), 2), dist.irecv(torch.ones(5), 2, tag=9)]
        board.put(f"pending/{fabric.rank}")
        dist.all_reduce(torch.ones(2))  # blocked behind them until the world is revoked
        for work in [*pending, *messages]:
            assert work is not None
            assert work.wait()
            assert len(work.get_future().wait()) == 1
        gathered = [torch.empty(2) for _ in range(3)]
        dist.all_gather(gathered, torch.full((2,), 5.0))
        assert all(part.tolist() == [5.0, 5.0] for part in gathered)
        dist.barrier()
        with pytest.raises(Interrupted):
            dist.all_gather_object([None] * 3, "object")
        with pytest.raises(Interrupted):
            fabric.exchange(b"good")
        fabric.quiesce()
        fabric.attempt_open = False
        with pytest.raises(Interrupted):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(Interrupted):
            dist.isend(torch.ones(1), 2)

    def revoking(fabric: Fabric, board: Board) -> None:
        for rank in (0, 1):
            board.get(f"pending/{rank}")
        fabric.revoke(1, "a test says so")

    run_ranks(attempting, attempting, revoking)


def test_outside_of_an_attempt_waiting_raises_and_futures_still_hold_tensors() -> None:
    def waiting(fabric: Fabric, board: Board) -> None:
        pending = dist.all_reduce(torch.ones(LARGE), async_op=True)
        message = dist.irecv(torch.ones(2), 1)
        assert pending is not None
        assert message is not None
        board.put("pending")
        for work in (pending, message):
            with pytest.raises(Interrupted):
                work.wait()
        assert pending.get_future().wait()[0].shape == (LARGE,)
        fabric.quiesce()

    def revoking(fabric: Fabric, board: Board) -> None:
        board.get("pending")
        fabric.revoke(1, "a test says so")

    run_ranks(waiting, revoking)


def test_objects_under_way_are_interrupted_even_inside_an_attempt() -> None:
    def gathering(fabric: Fabric, board: Board) -> None:
        fabric.attempt_open = True
        board.put("gathering")
        with pytest.raises(Interrupted):
            dist.all_gather_object([None, None], "object")

    def revoking(fabric: Fabric, board: Board) -> None:
        board.get("gathering")
        fabric.revoke(1, "a test says so")

    run_ranks(gathering, revoking)


def test_backward_of_a_revoked_attempt_raises_nothing_and_the_model_goes_on() -> None:
    def surviving(fabric: Fabric, _board: Board) -> None:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)))
        for attempt in range(5):
            fabric.attempt_open = True
            model.zero_grad()
            model(torch.ones(2, 9)).sum().backward()
            fabric.quiesce()
            fabric.attempt_open = False
            if attempt == 2:
                with pytest.raises((Interrupted, LinkError)):
                    fabric.exchange(b"")
        assert fabric.mode is Mode.REVOKED

    def dying(_fabric: Fabric, _board: Board) -> None:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)))
        for _ in range(2):
            model(torch.ones(2, 9)).sum().backward()
        loss = model(torch.ones(2, 9)).sum()
        model.module[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()

    run_ranks(surviving, surviving, dying)


def test_revoking_another_epoch_changes_nothing() -> None:
    def program(fabric: Fabric, _board: Board) -> None:
        fabric.revoke(7, "never heard of")
        fabric.revoke(0, "long over")
        dist.all_reduce(torch.ones(1))
        assert fabric.mode is Mode.LIVE
        fabric.exchange(b"done")

    run_ranks(program, program)


def test_what_hangs_past_its_deadline_is_a_broken_link() -> None:
    def waiting(fabric: Fabric, board: Board) -> Any:
        accused: list[Any] = []
        fabric.on_broken = lambda epoch, peers, _reason: accused.append((epoch, peers))
        group = dist.group.WORLD
        assert group is not None
        group.timeout_s = 0.05  # type: ignore[attr-defined] # one of ours
        with pytest.raises(Interrupted, match=r"nothing from n1-0000/0 within 0.05 s"):
            dist.all_reduce(torch.ones(1))
        board.put("late")
        return accused

    def hanging(_fabric: Fabric, board: Board) -> None:
        board.get("late")

    assert run_ranks(waiting, hanging)[0] == [(1, ("n1-0000/0",))]


def test_a_peer_that_said_farewell_is_no_accusation_until_it_is_needed() -> None:
    def staying(fabric: Fabric, board: Board) -> Any:
        accused: list[Any] = []
        fabric.on_broken = lambda epoch, peers, _reason: accused.append((epoch, peers))
        board.get("gone")
        assert accused == []
        assert fabric.mode is Mode.LIVE
        with pytest.raises(LinkError):
            fabric.exchange(b"")
        return accused

    def leaving(fabric: Fabric, board: Board) -> None:
        fabric.close(bye=True)
        board.put("gone")

    assert run_ranks(staying, leaving)[0] == [(1, ("n1-0000/0",))]
