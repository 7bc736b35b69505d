"""What a rank, or a stranger, may send that makes no sense, and what the others make of it."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import Board, Program, join, leave, run, uid_of
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.frame import HEADER, SEGMENT, Header, Kind, Op
from tmover.comm.handshake import MAGIC
from tmover.comm.world import CONTROL, VOTE, Lane, data_lane
from tmover.errors import Interrupted, LinkError, ProtocolError

NAMES = ["n0", "n1", "n2"]
SENDER = 2
NO_FRAME = b"\xff" * HEADER.size
Outcomes = list[tuple[str, list[str]]]


def sent_by_one(rubbish: Callable[[Fabric], tuple[Lane, bytes]]) -> Outcomes:
    """Have one rank send rubbish to rank 0 while all others vote and reduce in turns.

    Returns what ended each of the others, and whom it accused.
    """

    def body(board: Board, rank: int) -> Any:
        accused: list[str] = []
        fabric = join(board, NAMES[rank], NAMES)
        fabric.on_broken = lambda _epoch, peers, _reason: accused.extend(peers)
        dist.all_reduce(torch.ones(3))
        if rank == SENDER:
            lane, data = rubbish(fabric)
            fabric.present().peers[0].lanes[lane].sock.sendall(data)
            board.put("sent")
            board.get("over/0")
            ended = ""
        else:
            board.get("sent")
            ended = wait_for_the_end(fabric)
        board.put(f"over/{rank}")
        for other in range(1 if rank else 0, SENDER):
            board.get(f"over/{other}")
        fabric.close(bye=ended != "ProtocolError")
        return ended, accused

    programs: dict[str, Program] = {
        name: functools.partial(body, rank=rank) for rank, name in enumerate(NAMES)
    }
    outcomes = run(programs)
    return [outcomes[name].value for name in NAMES[:SENDER]]


def wait_for_the_end(fabric: Fabric) -> str:
    try:
        while True:
            fabric.exchange(b"good")
            dist.all_reduce(torch.ones(3))
    except (Interrupted, LinkError, ProtocolError) as error:
        return type(error).__name__


@pytest.mark.parametrize(
    "lane", [CONTROL, VOTE, data_lane("0")], ids=["control", "vote", "collectives"]
)
def test_what_is_no_frame_breaks_the_link_and_accuses_who_has_sent_it(lane: Lane) -> None:
    def rubbish(fabric: Fabric) -> tuple[Lane, bytes]:
        (name,) = fabric.groups
        return (data_lane(name) if lane.group else lane), NO_FRAME

    found = sent_by_one(rubbish)

    assert found[0][1] == [uid_of(NAMES[SENDER])]
    assert found[1][0] == "Interrupted"
    assert found[1][1] in ([], [uid_of(NAMES[SENDER])])
