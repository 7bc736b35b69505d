"""What a member says about the links it opens beside the training."""

from __future__ import annotations

import os
import queue
import resource
from typing import cast

from integration.comm.harness import Board, in_fabrics, make_plan, uid_of
from tmover.comm.fabric import Fabric
from tmover.core import rank as rules
from tmover.core.events import FromAgent, PrepareFailed
from tmover.core.orders import Prepare
from tmover.environment import WorkerEnvironment
from tmover.worker.control import Control
from tmover.worker.identity import Identity
from tmover.worker.runtime import Runtime


class Line:
    """A line to an agent that only listens."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[FromAgent] = queue.SimpleQueue()

    def send(self, event: FromAgent) -> None:
        self.sent.put(event)


def runtime_of(fabric: Fabric, line: Line, name: str) -> Runtime:
    identity = Identity(
        job="job", agent=f"{name}-0000", local_rank=0, slot=0, nnodes=2, nproc=1, sandbox=False
    )
    runtime = Runtime(
        identity,
        control=cast("Control", line),
        fabric=fabric,
        launch=0,
        environment=WorkerEnvironment.read({}),
    )
    with runtime.standing.changing():
        runtime.standing.rank = rules.start(runtime.standing.rank, 1)
    return runtime


def test_a_member_that_can_open_nothing_more_says_so() -> None:
    """The controller would wait for it otherwise, until the move is late."""

    def member(fabric: Fabric, board: Board, name: str) -> None:
        line = Line()
        runtime = runtime_of(fabric, line, name)
        plan = make_plan(board, 2, ["n0", "n1"])
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        runtime.on_message(Prepare(job="job", agent=uid_of(name), plan=plan, sources={}))
        answer = line.sent.get(timeout=10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert isinstance(answer, PrepareFailed)
        assert answer.epoch == 2
        assert "Too many open files" in answer.reason
        board.put(f"done/{name}")
        for other in ("n0", "n1"):
            board.get(f"done/{other}")

    in_fabrics(member, 2)
