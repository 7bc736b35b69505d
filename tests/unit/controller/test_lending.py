"""Loans between jobs of one pool, on a desk with two of them."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import time
from collections.abc import Iterator

import pytest

from support.jobs import Story, expired, joined, reported
from tmover import wire
from tmover.controller.desk import Desk, Ledger
from tmover.controller.journal import Journal, Settled
from tmover.controller.lending import Lending, order_after
from tmover.core.events import AnyEvent, Lent
from tmover.core.job import decide
from tmover.core.orders import Lend, OrderNode, ReassignNode

PROGRAM = wire.Program(job="k", agent="a0", script="train.py", cwd="/", env={"SECRET": "x"})
MOVED = ReassignNode(job="j", agent="s0", node="m0", to="k")


class Pool:
    """A desk with the jobs `j`, which has a standby, and `k`, which waits for a node."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.journal = Journal(directory / "journal")
        self.desk = Desk(self.journal)
        self.posted: list[AnyEvent] = []
        lender = Story(standbys=1, pool="p").training().job
        waits = Story(standbys=0, pool="p").training()
        waits.tell(expired("a1"), reported("a0/0", 5), reported("a2/0", 5))
        apart = {
            name: dataclasses.replace(agent, node=f"k{agent.node}")
            for name, agent in waits.job.agents.items()
        }
        borrower = dataclasses.replace(waits.job, name="k", agents=apart, left={})
        for job in (lender, borrower):
            self.desk.ledgers[job.name] = Ledger(job)
        self.desk.ledgers["k"].effects.append(OrderNode(job="k", exclude=()))
        self.lending = Lending(self.desk, self.posted.append)

    def handle(self) -> None:
        """Decide about what was posted, as the controller does in its next turn."""
        while self.posted:
            event = self.posted.pop(0)
            assert isinstance(event, Lent)
            self.desk.take_in(Lent(job=event.job, agent=event.agent, to=event.to, at=time.time()))

    def settle(self) -> None:
        self.desk.take_in(Settled(job="j", effect=MOVED))

    def borrow(self, *, settles: bool = True) -> str:
        async def run() -> str:
            asked = asyncio.ensure_future(self.lending.borrow("k"))
            await asyncio.sleep(0)
            self.handle()
            if settles:
                self.settle()
            return await asked

        return asyncio.run(run())


@pytest.fixture
def pool(tmp_path: pathlib.Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    yield made
    made.journal.close()


def test_nothing_is_lent_to_a_job_of_which_nobody_has_said_what_it_runs(pool: Pool) -> None:
    assert pool.borrow(settles=False) == ""
    pool.lending.look()

    assert pool.posted == []


def test_a_loan_is_the_lenders_event_and_known_once_the_scheduler_knows_it(pool: Pool) -> None:
    pool.lending.hear(PROGRAM)

    assert pool.borrow() == "standby m0 is lent by job j"
    assert pool.desk.ledgers["j"].job.gone["s0"].to == "k"


def test_a_scheduler_that_does_not_answer_is_waited_for_no_longer_than_is_set(
    pool: Pool,
) -> None:
    pool.lending = Lending(pool.desk, pool.posted.append, settled_s=0.0)
    pool.lending.hear(PROGRAM)

    assert pool.borrow(settles=False) == ""


def test_a_lender_that_needs_its_standby_after_all_keeps_it(pool: Pool) -> None:
    pool.lending.hear(PROGRAM)

    async def run() -> str:
        asked = asyncio.ensure_future(pool.lending.borrow("k"))
        await asyncio.sleep(0)
        ledger = pool.desk.ledgers["j"]
        ledger.job, _ = decide(ledger.job, expired("a1"))
        pool.handle()
        return await asked

    assert asyncio.run(run()) == ""
    assert "s0" in pool.desk.ledgers["j"].job.agents


def test_after_a_restart_the_one_that_is_on_its_way_is_not_lent_or_ordered_again(
    pool: Pool,
) -> None:
    pool.lending.hear(PROGRAM)
    assert pool.borrow()
    again = Lending(pool.desk, pool.posted.append)
    again.hear(PROGRAM)

    assert asyncio.run(again.borrow("k")) == "standby s0 is lent already"
    again.look()
    assert pool.posted == []


def test_a_standby_that_becomes_free_later_is_lent_then(pool: Pool) -> None:
    pool.lending.hear(PROGRAM)

    pool.lending.look()

    assert pool.posted == [Lent(job="j", agent="s0", to="k")]


def test_standbys_are_told_what_the_job_runs_members_are_asked(pool: Pool) -> None:
    pool.lending.hear(PROGRAM)

    def greeted(agent: str) -> wire.Greeting:
        event = joined(agent)
        name = event.agent
        return pool.lending.greeting(
            type(event)(
                job="k", agent=name, node="x", address="x", nproc=1, standby=event.standby
            ),
            "boot", b"secret",
        )  # fmt: skip

    assert (greeted("s5").pool, greeted("s5").program) == ("p", PROGRAM)
    assert (greeted("a0").pool, greeted("a0").program) == ("p", None)


def test_the_agent_is_told_when_the_scheduler_knows() -> None:
    assert order_after(Settled(job="j", effect=MOVED)) == [
        Lend(job="j", agent="s0", to="k", name="s0~1")
    ]
    assert order_after(Settled(job="j", effect=OrderNode(job="j", exclude=()))) == []
    assert order_after(Lent(job="j", agent="s0", to="k")) == []
