"""Send and receive between ranks, in every order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import Board, in_fabrics, in_world
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.timeouts import Timeouts
from tmover.errors import CallError, Interrupted, LinkError, ProtocolError

LARGE = 3_000_000
IMPATIENT = Timeouts(unacked_s=0.2, collective_s=20.0)


def test_ranks_that_both_send_first_do_not_wait_for_each_other() -> None:
    def program(rank: int, _size: int) -> None:
        other = 1 - rank
        for count in (1, 1000, LARGE):
            sent = dist.isend(torch.full((count,), float(rank)), other)
            received = torch.empty(count)
            assert dist.recv(received, other) == other
            assert sent is not None
            sent.wait()
            assert torch.equal(received, torch.full((count,), float(other)))

    in_world(program, 2)


def test_messages_find_their_tags_in_whatever_order_they_are_asked_for() -> None:
    def program(rank: int, _size: int) -> None:
        if rank == 0:
            for tag in (3, 1, 2, 1):
                dist.send(torch.tensor([tag, tag * tag]), 1, tag=tag)
        else:
            for tag in (1, 2, 3, 1):
                tensor = torch.zeros(2, dtype=torch.int64)
                dist.recv(tensor, 0, tag=tag)
                assert tensor.tolist() == [tag, tag * tag]

    in_world(program, 2)


def test_a_group_may_have_months() -> None:
    """Longer than `poll` can be told to wait."""

    def program(rank: int, size: int) -> None:
        group = dist.new_group(timeout=timedelta(days=100))
        for count in (1, LARGE):
            tensor = torch.full((count,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert tensor[-1] == sum(range(size))
            if rank == 0:
                dist.recv(tensor, 1, group=group)
            elif rank == 1:
                dist.send(tensor, 0, group=group)

    in_world(program, 3)


def test_a_message_may_be_longer_than_a_record() -> None:
    """Asked for or not: activations of a pipeline are as long as they are."""
    size = (1 << 28) + 1

    def program(rank: int, _size: int) -> None:
        tensor = torch.full((size,), rank, dtype=torch.uint8)
        if rank == 0:
            for tag in (1, 2):
                dist.send(tensor, 1, tag=tag)
            return
        for tag in (2, 1):
            tensor.fill_(9)
            dist.recv(tensor, 0, tag=tag)
            assert not tensor.any()

    in_world(program, 2)


def test_a_batch_goes_around_the_ring() -> None:
    def program(rank: int, size: int) -> None:
        after, before = (rank + 1) % size, (rank - 1) % size
        sent, received = torch.full((70_000,), float(rank)), torch.empty(70_000)
        operations = [
            dist.P2POp(dist.isend, sent, after),
            dist.P2POp(dist.irecv, received, before),
        ]
        for _ in range(5):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert torch.equal(received, torch.full_like(received, before))

    in_world(program, 3)


def test_a_message_may_come_from_any_rank() -> None:
    def program(rank: int, size: int) -> None:
        if rank:
            dist.send(torch.tensor([rank]), 0, tag=7)
            return
        seen = set()
        for _ in range(size - 1):
            tensor = torch.zeros(1, dtype=torch.int64)
            source = dist.recv(tensor, tag=7)
            assert tensor.item() == source
            seen.add(source)
        assert seen == {1, 2}

    in_world(program, 3)


def test_a_rank_may_write_to_itself_and_into_any_layout() -> None:
    def program(rank: int, _size: int) -> None:
        into = torch.zeros(3, 4).t()
        sent = dist.isend(torch.arange(12.0).view(4, 3), rank)
        received = dist.irecv(into, rank)
        assert sent is not None
        assert received is not None
        received.wait()
        assert torch.equal(into, torch.arange(12.0).view(4, 3))

    in_world(program, 2)


def test_messages_of_a_group_use_its_ranks() -> None:
    def program(rank: int, _size: int) -> None:
        group = dist.new_group([2, 0])
        tensor = torch.tensor([float(rank)])
        if rank == 0:
            dist.send(tensor, 2, group=group)
        if rank == 2:
            assert dist.recv(tensor, 0, group=group) == 0
            assert tensor.item() == 0

    in_world(program, 3)


def test_a_message_of_another_size_is_an_error_that_names_both() -> None:
    def program(rank: int, _size: int) -> Any:
        if rank == 0:
            dist.send(torch.ones(3), 1, tag=5)
            return None
        with pytest.raises(ProtocolError) as caught:
            dist.recv(torch.ones(4), 0, tag=5)
        return str(caught.value)

    found = in_world(program, 2)

    assert "a message with tag 5 of 12 bytes" in found["n1"]
    assert "a tensor of 16 bytes" in found["n1"]


def test_a_world_revoked_after_a_look_at_it_answers_messages_of_an_attempt_only() -> None:
    """A thread that revokes comes between the look at the mode and the use of the world."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        board.put(f"up/{name}")
        for other in ("n0", "n1"):
            board.get(f"up/{other}")
        fabric.present().latch.set("a test says so")
        assert fabric.mode is Mode.LIVE
        tensor = torch.full((3,), 7.0)
        fabric.attempt_open = True
        dist.send(tensor, 1 - fabric.rank)
        dist.recv(tensor, 1 - fabric.rank)
        assert tensor.tolist() == [1.0] * 3
        fabric.attempt_open = False
        with pytest.raises(Interrupted):
            dist.recv(tensor, 1 - fabric.rank)

    in_fabrics(member, 2)


def test_what_follows_from_a_message_may_wait_for_the_next_one() -> None:
    """Nobody waits for either: the thread that moves messages must not be the one that waits."""

    def program(rank: int, _size: int) -> list[float]:
        if rank == 0:
            for tag in (1, 2, 3):
                dist.send(torch.tensor([float(tag)]), 1, tag=tag)
            return []
        first, second, third = (torch.zeros(1) for _ in range(3))

        def go_on(_: Any) -> torch.Tensor:
            dist.recv(second, 0, tag=2)
            return second

        received = dist.irecv(first, 0, tag=1)
        assert received is not None
        followed = received.get_future().then(go_on)
        dist.recv(third, 0, tag=3)
        received.wait()
        followed.wait()
        return [first.item(), second.item(), third.item()]

    assert in_world(program, 2)["n1"] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("source", [0, None], ids=["named", "any"])
def test_a_message_that_is_not_sent_in_its_step_is_refused_at_its_end(source: int | None) -> None:
    def member(fabric: Fabric, board: Board, name: str) -> str:
        if fabric.rank == 0:
            with pytest.raises((Interrupted, LinkError)):  # the other one ends without a vote
                fabric.exchange(b"good")
            return ""
        tensor = torch.zeros(3)
        _ = dist.irecv(tensor, source, tag=9)
        with pytest.raises(CallError) as caught:
            fabric.quiesce()
        fabric.revoke(1, "a test ends")
        return str(caught.value)

    said = in_fabrics(member, 2, timeouts=IMPATIENT)["n1"]

    assert said.startswith(
        f"a message from {'any rank' if source is None else 'rank 0'} with tag 9"
    )
    assert "within one step" in said


def test_a_message_that_is_not_received_in_its_step_is_refused_at_its_end() -> None:
    """If it is so long that it cannot wait where it is."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        if fabric.rank == 0:
            with pytest.raises((Interrupted, LinkError)):
                fabric.exchange(b"good")
            return
        _ = dist.isend(torch.zeros(10 * LARGE), 0, tag=9)
        with pytest.raises(CallError, match="a message to rank 0 with tag 9"):
            fabric.quiesce()
        fabric.revoke(1, "a test ends")

    in_fabrics(member, 2, timeouts=IMPATIENT)


def test_a_message_may_come_while_the_step_ends() -> None:
    """Whoever waits at the end of a step has not voted, so the other one cannot have gone on."""

    def member(fabric: Fabric, board: Board, name: str) -> list[float]:
        tensor = torch.full((3,), float(fabric.rank))
        if fabric.rank == 1:
            _ = dist.irecv(tensor, 0)
            board.put("posted")
        else:
            board.get("posted")
            dist.send(tensor, 1)
        fabric.quiesce()
        fabric.exchange(b"good")
        return tensor.tolist()

    assert in_fabrics(member, 2, timeouts=IMPATIENT)["n1"] == [0.0] * 3
