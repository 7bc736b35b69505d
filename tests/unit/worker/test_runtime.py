"""A worker's runtime, with a real fabric and a line to the agent that is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from tmover.comm.fabric import Fabric
from tmover.comm.timeouts import Timeouts
from tmover.core.events import Broken, Member, Plan, Prepared, Reported, Sharing
from tmover.core.orders import Prepare, Start, Stop
from tmover.environment import WorkerEnvironment
from tmover.errors import ConfigError
from tmover.worker import runtime as runtime_module
from tmover.worker.control import Control
from tmover.worker.identity import Identity
from tmover.worker.runtime import Runtime
from tmover.worker.vote import Holding

NOBODY = "127.0.0.1:1"
"""Where nobody listens."""


class Line:
    """What a worker says to its agent."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.on_message: Callable[[Any], None] = lambda _: None

    def send(self, message: Any) -> None:
        self.said.append(message)
        self.on_message(message)

    def heard(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


@pytest.fixture
def line() -> Line:
    return Line()


def runtime_of(line: Line, fabric: Fabric, *, sandbox: bool = False, nnodes: int = 2) -> Runtime:
    identity = Identity(
        job="1", agent="a", local_rank=0, slot=0, nnodes=nnodes, nproc=1, sandbox=sandbox
    )
    environment = WorkerEnvironment.read({})
    return Runtime(
        identity, control=cast(Control, line), fabric=fabric, launch=1, environment=environment
    )


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric(job="1", secret=b"s" * 32, uid="a/0", address="127.0.0.1", timeouts=Timeouts())
    yield made
    made.close(bye=False)


def plan(fabric: Fabric, epoch: int) -> Plan:
    places = (("a/0", "n0", fabric.endpoint), ("b/0", "n1", NOBODY))
    members = tuple(
        Member(rank=rank, worker=worker, node=node, endpoint=endpoint)
        for rank, (worker, node, endpoint) in enumerate(places)
    )
    return Plan(epoch=epoch, members=members)


def test_a_standby_that_is_asked_twice_is_not_prepared_before_it_has_prepared(
    line: Line, fabric: Fabric
) -> None:
    runtime = runtime_of(line, fabric, sandbox=True)
    order = Prepare(job="1", agent="a", plan=plan(fabric, 2), sources={})

    runtime.on_message(order)
    runtime.on_message(order)
    before = line.heard(Prepared)
    runtime.say_prepared(2)
    runtime.on_message(order)

    assert not before
    assert [said.epoch for said in line.heard(Prepared)] == [2, 2]


def test_a_rank_that_cannot_connect_accuses_reports_and_waits_to_be_ended(
    line: Line, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "FORM_TIMEOUT_S", 0.5)
    runtime = runtime_of(line, fabric, sandbox=False)

    def end_after_the_report(message: Any) -> None:
        if isinstance(message, Reported):
            runtime.on_message(Stop(job="1", agent="a", code=7, reason="all start afresh"))

    line.on_message = end_after_the_report
    runtime.on_message(Start(job="1", agent="a", plan=plan(fabric, 1)))

    with pytest.raises(SystemExit) as ended:
        runtime.form()

    assert ended.value.code == 7
    assert [(said.epoch, said.peers) for said in line.heard(Broken)] == [(1, ("b/0",))]
    assert [(said.of, said.epoch) for said in line.heard(Reported)] == [(1, 0)]


def test_a_job_with_too_few_nodes_for_the_copies_it_needs_is_refused(
    line: Line, fabric: Fabric
) -> None:
    runtime = runtime_of(line, fabric, nnodes=2)

    with pytest.raises(ConfigError) as refused:
        runtime.share([Holding(2, False, b"x" * 16), Holding(1, False, b"y" * 16)])

    assert str(refused.value) == (
        "[worker] copies = 2: a job on 2 nodes has 1 other to keep a rank's copies: set "
        "TMOVER_WORKER_COPIES to 1 at most, or take 3 nodes"
    )


def test_replicas_that_part_keep_copies_on_as_many_nodes_as_there_are(
    line: Line, fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = runtime_of(line, fabric, nnodes=2)
    runtime.share([Holding(2, False, b"x" * 16)] * 2)
    runtime.share([Holding(2, False, b"y" * 16)] * 2)
    assert not runtime.copies.active

    runtime.share([Holding(2, False, b"y" * 16), Holding(2, False, b"z" * 16)])

    assert (runtime.copies.active, runtime.copies.nodes) == (True, 1)
    assert [(said.keepers, said.copies) for said in line.heard(Sharing)] == [((1, 0), 0), ((), 1)]
    assert "do not any more" in caplog.text


def test_replicas_of_which_one_changes_something_late_keep_copies(
    line: Line, fabric: Fabric
) -> None:
    runtime = runtime_of(line, fabric, nnodes=2)
    runtime.share([Holding(1, False, b"x" * 16)] * 2)

    for _ in range(2):
        runtime.share([Holding(1, False, b"y" * 16), Holding(1, True, b"y" * 16)])

    assert runtime.copies.active
    assert runtime.replicas == (0, 0)
    assert [(said.keepers, said.copies) for said in line.heard(Sharing)] == [((1, 0), 0), ((), 1)]


@pytest.mark.parametrize("nnodes", [1, 3])
def test_a_job_on_one_node_keeps_no_copies_whatever_is_set(
    line: Line, fabric: Fabric, monkeypatch: pytest.MonkeyPatch, nnodes: int
) -> None:
    monkeypatch.setenv("TMOVER_WORKER_COPIES", "2")
    runtime = runtime_of(line, fabric, nnodes=nnodes)

    runtime.share([Holding(2, False, bytes([rank] * 16)) for rank in range(nnodes)])

    assert runtime.copies.active is (nnodes > 1)


def test_copies_are_kept_on_as_many_nodes_as_rank_0_is_set_to(
    line: Line, fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = runtime_of(line, fabric, nnodes=3)

    runtime.share(
        [Holding(2, False, b"x" * 16), Holding(1, False, b"y" * 16), Holding(1, False, b"z" * 16)]
    )

    assert (runtime.copies.active, runtime.copies.nodes) == (True, 2)
    assert [(said.keepers, said.copies) for said in line.heard(Sharing)] == [((), 2)]
    assert "copies = 1 here, but the job keeps 2" in caplog.text


def test_a_job_whose_ranks_are_replicas_keeps_no_copies(line: Line, fabric: Fabric) -> None:
    runtime = runtime_of(line, fabric, nnodes=3)

    runtime.share([Holding(2, False, b"x" * 16)] * 3)

    assert not runtime.copies.active
    assert [(said.keepers, said.copies) for said in line.heard(Sharing)] == [((1, 2, 0), 0)]
