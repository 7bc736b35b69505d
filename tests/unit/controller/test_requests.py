"""What people ask becomes an event, or a refusal with its reason."""

from __future__ import annotations

import pytest

from tmover import wire
from tmover.controller import requests, status
from tmover.controller.desk import Ledger
from tmover.controller.presence import Presence, Who
from tmover.core.events import (
    AnyEvent,
    CancelRequested,
    Joined,
    MoveRequested,
    NodeReady,
    Submitted,
)
from tmover.core.job import Job, decide
from tmover.core.orders import Note
from tmover.core.progress import Progress
from tmover.errors import Refused


def ledger(name: str, *events: AnyEvent) -> Ledger:
    job = Job(name=name)
    for event in events:
        job, _ = decide(job, event)
    return Ledger(job)


def submitted(name: str) -> Submitted:
    return Submitted(job=name, nnodes=2, nproc=2, owner="ann")


def joined(node: str, *, standby: bool = False) -> Joined:
    return Joined(job="1", agent=f"{node}-aa", node=node, address="", nproc=2, standby=standby)


RUNNING = ledger(
    "1", submitted("1"), joined("node1"), joined("node2"), joined("node3", standby=True)
)
ENDED = ledger("2", submitted("2"), CancelRequested(job="2", reason="enough"))


def test_a_job_of_some_ranks_can_be_submitted() -> None:
    request = wire.SubmitRequest(nnodes=2, nproc=2, owner="ann")

    assert requests.submitted(request, "1") == submitted("1")


@pytest.mark.parametrize(
    ("nnodes", "nproc"), [(0, 1), (1, 0), (-1, -1), (10_001, 1), (1, 100_001), (400, 400)]
)
def test_a_job_of_too_few_or_too_many_ranks_is_refused(nnodes: int, nproc: int) -> None:
    with pytest.raises(Refused, match=f"^a job of {nnodes} nodes x {nproc} ranks: 1 to 100000"):
        requests.submitted(wire.SubmitRequest(nnodes=nnodes, nproc=nproc, owner="ann"), "1")


def test_the_only_job_that_has_not_ended_needs_no_name() -> None:
    ledgers = {"1": RUNNING, "2": ENDED}

    assert requests.choose(ledgers, None) == "1"
    assert requests.choose(ledgers, "2") == "2"


def test_without_a_single_one_a_job_must_be_named() -> None:
    with pytest.raises(Refused, match="no job runs here"):
        requests.choose({"2": ENDED}, None)
    with pytest.raises(Refused, match="several jobs run here, name one: 1, 3"):
        requests.choose({"1": RUNNING, "3": ledger("3", submitted("3"))}, None)
    with pytest.raises(Refused, match="there is no job 9 here"):
        requests.choose({"1": RUNNING}, "9")


def test_slurm_s_own_number_means_the_last_incarnation() -> None:
    names = ["slurm8", "slurm7", "slurm77", "slurm7r1", "slurm7r10", "9"]
    ledgers = {name: ledger(name, submitted(name)) for name in names}

    assert requests.choose(ledgers, "7") == "slurm7r10"
    assert requests.choose(ledgers, "slurm7") == "slurm7"
    assert requests.choose(ledgers, "8") == "slurm8"
    for unknown in ("78", ".", "7|8", "r1", ""):
        with pytest.raises(Refused, match="there is no job"):
            requests.choose(ledgers, unknown)


def test_a_local_job_of_that_number_goes_before_slurm_s() -> None:
    ledgers = {name: ledger(name, submitted(name)) for name in ("slurm7", "7")}

    assert requests.choose(ledgers, "7") == "7"
    assert requests.choose(ledgers, "slurm7") == "slurm7"


def test_a_job_of_slurm_whose_agents_tell_the_ranks_can_be_submitted() -> None:
    spec = wire.SlurmSpec(id=7, name="gpt", script="", cwd="/")
    request = wire.SubmitRequest(nnodes=2, nproc=0, owner="ann", standby=1, slurm=spec)

    assert requests.submitted(request, "slurm7") == Submitted(
        job="slurm7", nnodes=2, nproc=0, owner="ann", standby=1, allocated=True
    )


@pytest.mark.parametrize("node", ["node1", "node2", "node3"])
def test_any_node_of_the_job_can_be_left(node: str) -> None:
    request = wire.MoveRequest(node=node, reason="hot")

    found = requests.event(status.of(RUNNING, Presence(5), 0), request)

    assert found == MoveRequested(job="1", node=node, reason="hot")


def test_a_node_of_another_job_is_refused() -> None:
    with pytest.raises(Refused, match=r"^job 1 is not on node7; it is on node1, node2, node3$"):
        requests.event(
            status.of(RUNNING, Presence(5), 0), wire.MoveRequest(node="node7", reason="hot")
        )


def test_a_job_that_is_on_no_node_yet_says_how_to_see_when_it_is() -> None:
    waiting = status.of(ledger("1", submitted("1")), Presence(5), 0)

    with pytest.raises(Refused, match="it is on no node yet: `tmover status` shows when"):
        requests.event(waiting, wire.MoveRequest(node="node1", reason="hot"))


def test_a_job_that_has_ended_is_left_alone() -> None:
    with pytest.raises(Refused, match=r"^job 2 has ended: enough$"):
        requests.event(status.of(ENDED, Presence(5), 0), wire.CancelRequest(reason="again"))


def test_the_answer_is_what_was_decided() -> None:
    event = CancelRequested(job="1", reason="enough")
    notes = [Note(job="1", text="one"), Note(job="1", text="two")]

    assert requests.answer(event, [*notes]) == wire.Accepted(text="one; two", job="1")


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (submitted("1"), "job 1 is looked after"),
        (MoveRequested(job="1", node="node1", reason="hot"), "node1 is to be left"),
        (CancelRequested(job="1", reason="enough"), "job 1 is to end"),
    ],
)
def test_there_is_an_answer_when_nothing_was_said(
    event: Submitted | MoveRequested | CancelRequested, text: str
) -> None:
    assert requests.answer(event, []) == wire.Accepted(text=text, job="1")


def test_what_could_not_be_taken_in_is_no_success() -> None:
    answer = requests.answer(submitted("1"), None)

    assert answer == wire.RefusedReply(text="an internal error, see the controller's log")


def test_a_status_joins_what_was_decided_with_what_heartbeats_say() -> None:
    presence = Presence(5)
    presence.join(Who("1", "node1-aa"), "node1", b"r", now=10)
    beat = wire.Heartbeat(job="1", agent="node1-aa", steps=(7, 6))
    presence.beat(Who("1", "node1-aa"), beat)
    presence.join(Who("1", "node2-aa"), "node2", None, now=10)  # known from the journal only

    found = status.of(RUNNING, presence, now=12.5)

    assert [(s.slot, s.node, s.step, s.heard_s) for s in found.slots] == [
        (0, "node1", 6, 2.5),
        (1, "node2", None, None),
    ]
    assert [(s.node, s.heard_s) for s in found.standbys] == [("node3", None)]
    assert (found.step, found.world_size, found.owner, found.code) == (6, 4, "ann", None)


def test_a_status_says_whom_the_others_wait_for() -> None:
    presence = Presence(5)
    waits: tuple[dict[int, float], ...] = ({2: 3.0}, {})
    for first, agent, waited in zip((0, 2), ("node1-aa", "node2-aa"), waits, strict=True):
        who = Who("1", agent)
        presence.join(who, agent[:5], b"r", now=10)
        said = tuple(
            Progress(rank=rank, step=20, waited=waited, steps=10, median_s=1.0)
            for rank in (first, first + 1)
        )
        presence.beat(who, wire.Heartbeat(job="1", agent=agent, progress=said))

    found = status.of(RUNNING, presence, now=12.5)

    late = wire.WaitStatus(rank=2, node="node2", per_step_s=0.3, steps=10, is_straggler=True)
    assert found.waits == (late,)


def test_the_status_of_a_job_that_ended_says_how() -> None:
    found = status.of(ENDED, Presence(5), 0)

    assert (found.phase, found.code, found.outcome) == ("ended", 130, "enough")


def test_of_several_nodes_those_are_left_that_the_job_is_on() -> None:
    request = wire.MoveRequest(node="node9", more=("node2", "node1", "node2"), reason="hot")

    found = requests.event(status.of(RUNNING, Presence(5), 0), request)

    assert found == MoveRequested(job="1", node="node2", reason="hot", more=("node1",))


def test_a_job_that_is_on_none_of_several_nodes_refuses() -> None:
    request = wire.MoveRequest(node="node8", more=("node9",), reason="hot")

    with pytest.raises(Refused, match="job 1 is not on node8, node9; it is on node1"):
        requests.event(status.of(RUNNING, Presence(5), 0), request)


def test_a_node_may_be_ready_that_the_job_is_not_on() -> None:
    request = wire.ReadyRequest(node="node9")

    found = requests.event(status.of(RUNNING, Presence(5), 0), request)

    assert found == NodeReady(job="1", node="node9")
