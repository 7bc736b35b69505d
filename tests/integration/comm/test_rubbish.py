"""What a rank, or a stranger, may send that makes no sense, and what the others make of it."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import Board, Program, in_fabrics, join, run, uid_of
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.frame import HEADER, Header, Kind, Op
from tmover.comm.handshake import MAGIC
from tmover.comm.world import CONTROL, VOTE, Lane, data_lane
from tmover.errors import Interrupted, LinkError, ProtocolError

NAMES = ["n0", "n1", "n2"]
SENDER = 2
DATA = Lane("the only group", "data")
NO_FRAME = b"\xff" * HEADER.size
ENDS = (Interrupted, LinkError, ProtocolError)


class End(NamedTuple):
    """What ended a rank, and whom it accused."""

    error: str
    accused: set[str]


def sent_by_one(lane: Lane, rubbish: bytes) -> tuple[End, End]:
    """Have the last rank send rubbish to rank 0, while the others use that kind of link."""

    def body(board: Board, rank: int) -> Any:
        accused: set[str] = set()
        fabric = join(board, NAMES[rank], NAMES)
        fabric.on_broken = lambda _epoch, peers, _reason: accused.update(peers)
        dist.all_reduce(torch.ones(3))
        board.put(f"in/{rank}")
        if rank == SENDER:
            for other in range(SENDER):
                board.get(f"in/{other}")
            fabric.present().peers[0].lanes[lane_of(fabric, lane)].sock.sendall(rubbish)
            for other in range(SENDER):
                board.get(f"over/{other}")
            fabric.close(bye=True)
            return None
        error = use(fabric, lane)
        board.put(f"over/{rank}")
        if error != "ProtocolError":  # by which a script ends; the others see that
            for other in range(SENDER):
                board.get(f"over/{other}")
        fabric.close(bye=error != "ProtocolError")  # whoever is accused now, was before
        return error, accused

    programs: dict[str, Program] = {
        name: functools.partial(body, rank=rank) for rank, name in enumerate(NAMES)
    }
    outcomes = run(programs)
    first, second = (End(*outcomes[name].value) for name in NAMES[:SENDER])
    return first, second


def lane_of(fabric: Fabric, lane: Lane) -> Lane:
    return data_lane(*fabric.groups) if lane is DATA else lane


def use(fabric: Fabric, lane: Lane) -> str:
    try:
        while True:
            if lane is DATA:
                dist.all_reduce(torch.ones(3))
            else:
                fabric.exchange(b"good")
    except ENDS as error:
        return type(error).__name__


def frame(**fields: int) -> bytes:
    usual = Header(kind=Kind.VOTE, op=Op.NONE, detail=0, epoch=1, seq=1, length=4, total=4)
    return HEADER.pack(*usual._replace(**fields))


@pytest.mark.parametrize("lane", [CONTROL, VOTE, DATA], ids=["control", "vote", "data"])
def test_what_is_no_frame_accuses_who_has_sent_it_and_ends_the_world_for_all(lane: Lane) -> None:
    first, second = sent_by_one(lane, NO_FRAME)

    assert first.accused == {uid_of(NAMES[SENDER])}
    assert first.error != "ProtocolError"
    assert second.error == "Interrupted"
    assert second.accused == set()


def test_what_is_said_on_the_control_link_and_goes_on_accuses_who_has_said_it() -> None:
    first, second = sent_by_one(CONTROL, frame(kind=Kind.REVOKE) + b"word")

    assert first.accused == {uid_of(NAMES[SENDER])}
    assert second.error == "Interrupted"


def test_a_revocation_of_an_epoch_nobody_knows_changes_nothing() -> None:
    words = [frame(kind=Kind.REVOKE, epoch=epoch, length=0, total=0) for epoch in (0, 7, 1 << 31)]
    real = frame(kind=Kind.REVOKE, length=0, total=0)

    first, second = sent_by_one(CONTROL, b"".join(words) + real)

    assert [first, second] == [End("Interrupted", set())] * 2


def test_a_vote_of_another_epoch_ends_the_world_for_all_and_accuses_nobody() -> None:
    first, second = sent_by_one(VOTE, frame(epoch=9) + b"vote")

    assert [first, second] == [End("Interrupted", set())] * 2


@pytest.mark.parametrize(
    "head",
    [{"total": 1 << 60}, {"length": 100}, {"length": 2}, {"seq": 99}, {"kind": Kind.DATA}],
    ids=["endless", "longer than its message", "shorter", "another vote", "another kind"],
)
def test_a_vote_that_makes_no_sense_ends_who_gets_it_and_so_the_world(head: dict[str, int]) -> None:
    first, second = sent_by_one(VOTE, frame(**head) + bytes(100))

    assert first.error == "ProtocolError"
    assert second.error != "ProtocolError"


def test_strangers_at_the_door_disturb_nobody() -> None:
    """Random bytes, a handshake that breaks off, one that hangs: all while ranks vote."""

    def body(fabric: Fabric, board: Board, name: str) -> None:
        door = call(fabric)
        visits: list[Callable[[], socket.socket]] = [
            lambda: knock(door, os.urandom(4096)),
            lambda: knock(door, MAGIC),
            lambda: knock(door, MAGIC + b"\xff\xff" + os.urandom(100)),
            lambda: knock(door, b""),
        ]
        visitors = []
        for visit in visits:
            visitors.append(visit())
            assert fabric.exchange(b"good") == [b"good"] * 3
            dist.all_reduce(torch.ones(3))
        for visitor in visitors[:2]:
            visitor.close()
        assert fabric.exchange(b"good") == [b"good"] * 3
        assert fabric.mode is Mode.LIVE
        for visitor in visitors[2:]:
            visitor.close()
        board.put(f"done/{name}")
        for other in NAMES:
            board.get(f"done/{other}")

    in_fabrics(body, 3)


def call(fabric: Fabric) -> tuple[str, int]:
    host, _, port = fabric.endpoint.rpartition(":")
    return host, int(port)


def knock(door: tuple[str, int], data: bytes) -> socket.socket:
    visitor = socket.create_connection(door)
    visitor.sendall(data)
    return visitor
