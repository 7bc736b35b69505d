from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from tmover.comm.inbox import Inbox, Message
from tmover.comm.world import World
from tmover.core.events import Member, Plan


@pytest.fixture
def world() -> Iterator[World]:
    members = (Member(rank=0, worker="a", node="a", endpoint=""),)
    made = World(Plan(epoch=1, members=members), "a", burnt=(), timeout_s=1.0)
    yield made
    made.latch.close()


def receive(world: World, tag: int) -> Message:
    return Message(torch.zeros(1), world=world, outgoing=False, peer=0, tag=tag, timeout_s=1.0)


def test_a_tag_is_forgotten_once_its_messages_are_through(world: World) -> None:
    """Whoever tags messages by their step uses another tag in every one."""

    def boxes() -> int:
        return sum(type(thing) is deque for thing in gc.get_objects())

    inbox = Inbox(0, lambda _tag: None)
    before = boxes()
    for tag in range(1000):
        data = torch.tensor([float(tag)]).numpy().tobytes()
        first, second = receive(world, tag), receive(world, tag)
        if tag % 2:
            inbox.put(tag, bytearray(data))
            assert inbox.ask(first)
        else:
            assert not inbox.ask(first)
            inbox.put(tag, bytearray(data))
        assert not inbox.ask(second)
        assert inbox.waiting() == [second]
        inbox.put(tag, bytearray(data))
        assert first.row.tolist() == second.row.tolist() == [tag]

    assert boxes() - before < 10
    assert not inbox.wanted()
