"""The shell in this process, with decisions that a test wrote down."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import msgspec
import pytest

from support.schedulers import ScriptedScheduler
from support.scripted import journaled
from tmover.config import Config, ControllerConfig, DeadlineConfig
from tmover.controller import keys
from tmover.controller.desk import Decide, Desk
from tmover.controller.gate import Gate
from tmover.controller.journal import Journal
from tmover.controller.shell import Controller
from tmover.core.events import AnyEvent, CancelRequested, Joined, Submitted, Wait
from tmover.core.job import Job, decide
from tmover.core.orders import Action, ArmDeadline, OrderNode
from tmover.core.roster import Ordered

CONFIG = Config(
    controller=ControllerConfig(lease_s=0.3, poll_s=0.01),
    deadlines=DeadlineConfig(form_s=0.1, standby_s=0.05),
)
SUBMITTED = Submitted(job="1", nnodes=1, nproc=1, owner="ann")
ORDER = OrderNode(job="1", exclude=())


@pytest.fixture
def journal(tmp_path: pathlib.Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal")
    yield journal
    journal.close()


def run(
    journal: Journal,
    state: pathlib.Path,
    *events: AnyEvent,
    until: Callable[[], bool],
    decide: Decide = decide,
    scheduler: ScriptedScheduler | None = None,
) -> None:
    """Be the controller until it is so."""

    async def control() -> None:
        server, client = keys.make(state)
        gate = Gate("tcp://127.0.0.1:0", server=server, client=client)
        controller = Controller(
            CONFIG, state, boot="b", desk=Desk(journal, decide), gate=gate,
            scheduler=scheduler or ScriptedScheduler(),
        )  # fmt: skip
        task = asyncio.ensure_future(controller.run())
        for event in events:
            controller.post(event)
        while not until():
            assert not task.done(), task.exception()
            await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        gate.close()

    asyncio.run(asyncio.wait_for(control(), timeout=30))


def test_a_timer_that_is_set_again_begins_anew(journal: Journal, tmp_path: pathlib.Path) -> None:
    journal.append("1", [SUBMITTED])

    def arms(job: Job, event: AnyEvent) -> tuple[Job, list[Action]]:
        if not isinstance(event, CancelRequested):
            return job, []
        waits = (Wait.STANDBY, Wait.STANDBY, Wait.FORM)
        return job, [ArmDeadline(job="1", wait=wait, epoch=0) for wait in waits]

    run(
        journal, tmp_path, CancelRequested(job="1", reason=""),
        until=lambda: waits(tmp_path)[-1:] == ["form"], decide=arms,
    )  # fmt: skip

    assert waits(tmp_path) == ["standby", "form"]


def waits(state: pathlib.Path) -> list[str]:
    """Return which deadlines the journal says have passed."""
    lines = (state / "journal" / "1.jsonl").read_bytes().splitlines()
    entries = [msgspec.json.decode(line)["entry"] for line in lines]
    return [entry["wait"] for entry in entries if entry["type"] == "DeadlinePassed"]


def test_every_node_that_is_missing_is_ordered(journal: Journal, tmp_path: pathlib.Path) -> None:
    journal.append("1", [SUBMITTED])
    scheduler = ScriptedScheduler()

    def orders(job: Job, event: AnyEvent) -> tuple[Job, list[Action]]:
        job = dataclasses.replace(job, ordered=Ordered(2, 0))
        return job, [ORDER, ORDER] if isinstance(event, CancelRequested) else []

    run(
        journal, tmp_path, CancelRequested(job="1", reason=""),
        until=lambda: journaled(tmp_path, "1").count("Settled") == 2,
        decide=orders, scheduler=scheduler,
    )  # fmt: skip

    assert scheduler.calls == ["order 1 but "] * 2


def test_what_was_ordered_and_not_done_is_ordered_after_a_restart(
    journal: Journal, tmp_path: pathlib.Path
) -> None:
    def orders(job: Job, _: AnyEvent) -> tuple[Job, list[Action]]:
        return dataclasses.replace(job, ordered=Ordered(1, 0)), [ORDER]

    journal.append("1", [SUBMITTED])
    scheduler = ScriptedScheduler()

    for _ in range(2):
        run(
            journal, tmp_path, until=lambda: "Settled" in journaled(tmp_path, "1"),
            decide=orders, scheduler=scheduler,
        )  # fmt: skip

    assert scheduler.calls == ["order 1 but "]


def test_an_agent_that_died_while_no_controller_ran_is_lost_after_a_lease(
    journal: Journal, tmp_path: pathlib.Path
) -> None:
    joined = Joined(
        job="1", agent="node1-aa", node="node1", address="", nproc=1, standby=False, slot=0
    )
    journal.append("1", [SUBMITTED, joined])

    run(journal, tmp_path, until=lambda: "LeaseExpired" in journaled(tmp_path, "1"))


def test_an_event_of_a_job_that_is_not_there_harms_nothing(
    journal: Journal, tmp_path: pathlib.Path
) -> None:
    stray = CancelRequested(job="9", reason="")
    journal.append("1", [SUBMITTED])

    run(
        journal, tmp_path, stray, CancelRequested(job="1", reason="enough"),
        until=lambda: "CancelRequested" in journaled(tmp_path, "1"),
    )  # fmt: skip

    assert not (tmp_path / "journal" / "9.jsonl").exists()
