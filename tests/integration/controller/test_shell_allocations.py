"""The shell in this process, with jobs in allocations of a scheduler that says what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from support.schedulers import ScriptedAllocations, ScriptedScheduler
from support.scripted import journaled
from tmover import wire
from tmover.config import Config, ControllerConfig
from tmover.controller import keys
from tmover.controller.desk import Decide, Desk
from tmover.controller.gate import Gate
from tmover.controller.journal import Journal, Settled
from tmover.controller.shell import Controller
from tmover.controller.work import Item, Said
from tmover.core.events import CancelRequested, Joined, Left, Submitted
from tmover.core.job import Job, decide
from tmover.core.orders import EndJob, OrderNode, ReleaseNode
from tmover.scheduler.interface import Allocation, Fate

CONFIG = Config(controller=ControllerConfig(lease_s=0.3, poll_s=0.01))
SECRET = "hf_do_not_show"
SPEC = wire.SlurmSpec(id=7, name="gpt", script="#!/bin/sh\n", cwd="/", env={"TOKEN": SECRET})
SUBMIT = wire.SubmitRequest(nnodes=1, nproc=1, owner="ann", slurm=SPEC)
SLURM_7 = Submitted(job="slurm7", nnodes=1, nproc=1, owner="ann", allocated=True)
LOCAL = Submitted(job="1", nnodes=1, nproc=1, owner="ann")


class HeardGate(Gate):
    """Notes what is sent, by whom it goes to."""

    sent: list[tuple[bytes, wire.FromController]]

    def send(self, route: bytes, message: wire.FromController) -> bool:
        self.sent.append((route, message))
        return True


class Shell:
    """A controller that a test starts, feeds and ends, with what it sent and what it asked for."""

    def __init__(self, state: pathlib.Path, journal: Journal) -> None:
        self.state, self.journal = state, journal
        self.allocations: ScriptedAllocations | None = ScriptedAllocations([])
        self.sent: list[tuple[bytes, wire.FromController]] = []
        self.decide: Decide = decide
        self.desk = Desk(journal)

    def run(self, *turns: Iterable[Item], until: Callable[[], bool]) -> None:
        """Be the controller until it is so; the items of a turn come at once."""

        async def control() -> None:
            server, client = keys.make(self.state)
            gate = HeardGate("tcp://127.0.0.1:0", server=server, client=client)
            gate.sent = self.sent
            self.desk = Desk(self.journal, self.decide)
            controller = Controller(
                CONFIG, self.state, boot="b", desk=self.desk, gate=gate,
                scheduler=ScriptedScheduler(), allocations=self.allocations,
            )  # fmt: skip
            for turn in turns:
                controller.turn(turn)
            task = asyncio.ensure_future(controller.run())
            try:
                while not until():
                    assert not task.done(), task.exception()
                    await asyncio.sleep(0.005)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                gate.close()

        asyncio.run(asyncio.wait_for(control(), timeout=30))

    def hear(self, *messages: wire.ToController, user: str = "") -> list[wire.FromController]:
        """Return what is answered to messages that come one after the other."""
        before = len(self.sent)
        self.run(*[[Said(b"r", message, user)] for message in messages], until=lambda: True)
        return [message for _, message in self.sent[before:]]


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Iterator[Shell]:
    journal = Journal(tmp_path / "journal")
    yield Shell(tmp_path, journal)
    journal.close()


def joined(job: str, agent: str = "node1-aa") -> Joined:
    node = agent.partition("-")[0]
    return Joined(job=job, agent=agent, node=node, address="", nproc=1, standby=False, slot=0)


# --- submitting -----------------------------------------------------------------------------------


def test_a_job_of_slurm_that_is_submitted_twice_is_one(shell: Shell) -> None:
    answers = shell.hear(SUBMIT, SUBMIT)

    assert answers == [
        wire.Accepted(text="waiting for 1 nodes", job="slurm7"),
        wire.Accepted(text="job slurm7 is known here", job="slurm7"),
    ]
    assert shell.allocations is not None
    assert shell.allocations.adopted == [("slurm7", "ann", SPEC)]
    assert journaled(shell.state, "slurm7") == ["Submitted"]
    assert len(keys.read_secret(shell.state, "slurm7")) == keys.SECRET_BYTES


def test_how_slurm_answers_is_shown_with_jobs_of_slurm_alone(shell: Shell) -> None:
    local = wire.SubmitRequest(nnodes=1, nproc=1, owner="ann")

    *_, of_none = shell.hear(local, wire.StatusRequest())
    *_, of_one = shell.hear(SUBMIT, wire.StatusRequest())

    assert isinstance(of_none, wire.StatusReply)
    assert isinstance(of_one, wire.StatusReply)
    assert [of_none.scheduler, of_one.scheduler] == ["", "Slurm is asked nothing"]


def test_a_job_that_is_submitted_twice_at_once_is_one(shell: Shell) -> None:
    shell.run([Said(b"r", SUBMIT), Said(b"s", SUBMIT)], until=lambda: len(shell.sent) == 2)

    texts = [(route, message.text) for route, message in shell.sent]  # type: ignore[union-attr]
    assert texts == [(b"r", "waiting for 1 nodes"), (b"s", "job slurm7 is looked after")]
    assert list(shell.desk.ledgers) == ["slurm7"]


def test_who_submits_a_job_again_that_is_just_ended_is_answered(shell: Shell) -> None:
    shell.hear(SUBMIT)
    cancel = wire.CancelRequest(job="slurm7", reason="enough")

    shell.run([Said(b"r", cancel), Said(b"s", SUBMIT)], until=lambda: len(shell.sent) >= 3)

    assert (b"s", wire.Accepted(text="job slurm7 is known here", job="slurm7")) in shell.sent


def test_a_job_of_that_number_that_has_ended_is_not_begun_again(shell: Shell) -> None:
    *_, refusal = shell.hear(SUBMIT, wire.CancelRequest(job="7", reason="enough"), SUBMIT)

    assert isinstance(refusal, wire.RefusedReply)
    assert refusal.text.startswith("job slurm7 has ended here already: if Slurm counts its jobs")


def test_without_slurm_a_job_of_slurm_is_refused(shell: Shell) -> None:
    shell.allocations = None

    (refusal,) = shell.hear(SUBMIT)

    assert isinstance(refusal, wire.RefusedReply)
    assert refusal.text.startswith("this controller cannot ask Slurm")
    assert shell.desk.ledgers == {}


def test_nobody_learns_of_another_user_s_job_by_submitting_it(shell: Shell) -> None:
    shell.hear(SUBMIT, user="ann")
    bob_s = wire.SubmitRequest(nnodes=1, nproc=1, owner="bob", slurm=SPEC)

    answers = shell.hear(
        bob_s, SUBMIT, wire.CancelRequest(job="slurm7", reason="mine"),
        wire.MoveRequest(node="node1", reason="mine"), joined("slurm7"),
        wire.Heartbeat(job="slurm7", agent="node1-aa"), wire.StatusRequest(), user="bob",
    )  # fmt: skip

    assert [type(answer) for answer in answers] == [wire.RefusedReply] * 6 + [wire.StatusReply]
    assert answers[-1] == wire.StatusReply(jobs=())
    assert journaled(shell.state, "slurm7") == ["Submitted"]


def test_what_a_job_s_environment_holds_is_in_no_journal_and_no_log(
    shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    shell.allocations = None
    shell.hear(SUBMIT)
    shell.allocations = ScriptedAllocations([])
    shell.hear(SUBMIT, SUBMIT)

    assert "heard SubmitRequest(" in caplog.text
    assert SECRET not in caplog.text
    for path in shell.state.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


# --- the end of agents ----------------------------------------------------------------------------


@pytest.mark.parametrize(("submitted", "nudges"), [(SLURM_7, 1), (LOCAL, 0)])
def test_an_agent_that_ends_has_slurm_asked_soon(
    shell: Shell, submitted: Submitted, nudges: int
) -> None:
    job = submitted.job
    shell.journal.append(job, [submitted, joined(job)])
    keys.make_secret(shell.state, job)

    shell.hear(Left(job=job, agent="node1-aa", code=-15, reason="told to end"))

    assert shell.allocations is not None
    assert journaled(shell.state, job)[-1] == "Left"
    assert shell.allocations.nudges == nudges


def test_after_a_restart_a_node_is_kept_for_a_lease_for_an_agent_that_was_let_go(
    shell: Shell,
) -> None:
    release = ReleaseNode(job="slurm7", agent="node2-aa", node="node2", reason="released")
    shell.journal.append("slurm7", [SLURM_7])
    shell.decide = lambda job, event: (decide(job, event)[0], [release])
    allocations = shell.allocations
    assert allocations is not None
    begin = time.monotonic()

    shell.run(until=lambda: bool(allocations.errands))

    assert time.monotonic() - begin > CONFIG.controller.lease_s
    assert allocations.errands == [release]


# --- what becomes of allocations ------------------------------------------------------------------


def test_a_requeued_job_is_another_one_that_begins_once(shell: Shell) -> None:
    shell.journal.append("slurm7", [SLURM_7])
    assert shell.allocations is not None
    shell.allocations.looks = [
        [
            Allocation(job="slurm7", fate=Fate.REQUEUED, text="Slurm has requeued job 7"),
            Allocation(job="slurm7r1", fate=Fate.PENDING, text="Slurm job 7 PENDING"),
        ]
    ]
    shell.allocations.successors = ["slurm7r1"]

    def is_over() -> bool:
        return "Settled" in journaled(shell.state, "slurm7")

    shell.run(until=is_over)

    assert journaled(shell.state, "slurm7r1") == ["Submitted"]
    assert journaled(shell.state, "slurm7") == ["Submitted", "CancelRequested", "Settled"]
    assert shell.desk.ledgers["slurm7r1"].job.owner == "ann"
    assert [type(errand) for errand in shell.allocations.errands] == [EndJob]
    assert len(keys.read_secret(shell.state, "slurm7r1")) == keys.SECRET_BYTES


def test_a_job_whose_allocation_was_cancelled_ends(shell: Shell) -> None:
    shell.journal.append("slurm7", [SLURM_7])
    assert shell.allocations is not None
    text = "Slurm job 7 was cancelled"
    shell.allocations.looks = [[Allocation(job="slurm7", fate=Fate.STOPPED, text=text)]]

    shell.run(until=lambda: "Settled" in journaled(shell.state, "slurm7"))

    end = shell.desk.ledgers["slurm7"].job.phase
    assert (end.code, end.reason) == (130, text)  # type: ignore[union-attr]


def test_what_was_told_of_an_errand_is_there_after_a_restart(shell: Shell) -> None:
    order = OrderNode(job="slurm7", exclude=("node1",), total=1)
    note = "standby ordered: Slurm job 8"
    kept = Submitted(job="slurm7", nnodes=1, nproc=1, owner="ann", standby=1, allocated=True)
    shell.journal.append("slurm7", [kept, joined("slurm7")])
    job = Job(name="slurm7")
    for event in (kept, joined("slurm7")):
        job, actions = decide(job, event)
    assert order in actions

    shell.run([Settled(job="slurm7", effect=order, note=note)], until=lambda: True)

    restored = Desk(shell.journal).ledgers["slurm7"]
    assert restored.notes[-1].endswith(f" {note}")
    assert restored.effects == []


def test_an_allocation_of_a_job_that_ends_is_ended_once(shell: Shell) -> None:
    shell.journal.append("slurm7", [SLURM_7])

    for _ in range(2):
        shell.run(
            [CancelRequested(job="slurm7", reason="enough")],
            until=lambda: "Settled" in journaled(shell.state, "slurm7"),
        )

    assert shell.allocations is not None
    assert shell.allocations.errands == [EndJob(job="slurm7", code=130, reason="enough")]
