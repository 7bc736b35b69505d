"""Fences and orders: made until they succeed, as long as they are wanted, one at a time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from support.schedulers import ScriptedScheduler
from tmover.controller.desk import Ledger
from tmover.controller.errands import Errands
from tmover.controller.journal import Settled
from tmover.core.events import EndNode, Errand, Joined, OrderNode, Submitted
from tmover.core.job import decide
from tmover.core.phase import Ended
from tmover.core.roster import Job, Ordered
from tmover.errors import SchedulerError
from tmover.scheduler.interface import NodeInfo, NodeState

FENCE = EndNode(job="1", node="node2", reason="lost")
ORDER = OrderNode(job="1", exclude=("node1", "node2"))
AWAY = SchedulerError("slurmctld is away")


def ledger(*effects: Errand, ordered: int = 0) -> Ledger:
    made = Ledger(Job(name="1", ordered=Ordered(ordered, 0)))
    made.effects = list(effects)
    return made


def run(
    scheduler: ScriptedScheduler,
    book: Ledger,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Errand]:
    """Pursue what `book` holds, as the controller does, to its end; return what was settled."""
    settled: list[Errand] = []

    async def pursue() -> None:
        queue: asyncio.Queue[Settled] = asyncio.Queue()
        errands = Errands(scheduler, again_s=0.001, post=queue.put_nowait)
        errands.pursue(book)
        meanwhile()
        while book.effects:
            effect = (await queue.get()).effect
            settled.append(effect)
            book.effects.remove(effect)
            errands.settled(effect)
            errands.pursue(book)
        await errands.close()

    asyncio.run(pursue())
    return settled


def test_a_node_is_fenced_and_that_is_settled() -> None:
    scheduler = ScriptedScheduler()

    assert run(scheduler, ledger(FENCE)) == [FENCE]
    assert scheduler.calls == ["end node2: lost"]


def test_a_call_that_fails_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = ScriptedScheduler()
    scheduler.ends = [AWAY, OSError("no"), None]

    assert run(scheduler, ledger(FENCE)) == [FENCE]
    assert len(scheduler.calls) == 3
    assert "slurmctld is away, asking again" in caplog.text


def test_a_node_that_carries_another_job_by_now_is_left_alone() -> None:
    busy = NodeInfo(name="node2", address="", state=NodeState.ALLOCATED, job="7")
    scheduler = ScriptedScheduler([busy])

    assert run(scheduler, ledger(FENCE)) == [FENCE]
    assert scheduler.calls == []


def test_a_node_to_which_the_job_came_back_is_left_alone() -> None:
    joined = Joined(job="1", agent="node2-cc", node="node2", address="", nproc=1, standby=False)
    book = ledger(FENCE)
    for event in (Submitted(job="1", nnodes=1, nproc=1, owner="ann"), joined):
        book.job, _ = decide(book.job, event)
    scheduler = ScriptedScheduler()

    assert run(scheduler, book) == [FENCE]
    assert scheduler.calls == []


def test_orders_are_made_one_after_the_other() -> None:
    scheduler = ScriptedScheduler()
    scheduler.orders = [None, "node8", "node9"]

    assert run(scheduler, ledger(ORDER, ORDER, ordered=2)) == [ORDER, ORDER]
    assert scheduler.calls == ["order 1 but node1,node2"] * 3


def test_an_order_is_moot_once_enough_standbys_came() -> None:
    scheduler = ScriptedScheduler()
    scheduler.orders = [None]
    book = ledger(ORDER, ordered=1)

    def comes() -> None:
        book.job = dataclasses.replace(book.job, ordered=Ordered(0, 0))

    assert run(scheduler, book, meanwhile=comes) == [ORDER]


def test_an_order_is_moot_once_the_job_has_ended() -> None:
    book = ledger(ORDER, ordered=1)
    book.job = dataclasses.replace(book.job, phase=Ended(code=0, reason="done"))
    scheduler = ScriptedScheduler()

    assert run(scheduler, book) == [ORDER]
    assert scheduler.calls == []


def test_a_fence_and_an_order_do_not_wait_for_each_other() -> None:
    scheduler = ScriptedScheduler()
    scheduler.orders = [None, None, None, "node9"]

    assert run(scheduler, ledger(ORDER, FENCE, ordered=1)) == [FENCE, ORDER]


def test_a_call_that_breaks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = ScriptedScheduler()
    scheduler.ends = [ZeroDivisionError()]

    async def pursue() -> None:
        errands = Errands(scheduler, again_s=0.001, post=lambda _: None)
        errands.pursue(ledger(FENCE))
        while "a call of the scheduler failed" not in caplog.text:
            await asyncio.sleep(0.001)
        await errands.close()

    asyncio.run(pursue())

    assert "ZeroDivisionError" in caplog.text
