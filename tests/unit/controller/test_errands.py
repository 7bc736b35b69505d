"""Fences and orders: made until they succeed, as long as they are wanted, one at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from support.schedulers import ScriptedAllocations, ScriptedScheduler
from tmover.controller.desk import Ledger
from tmover.controller.errands import Errands
from tmover.controller.journal import Settled
from tmover.controller.presence import Who
from tmover.core.events import Joined, Submitted
from tmover.core.job import decide
from tmover.core.orders import EndJob, EndNode, Errand, OrderNode, ReassignNode, ReleaseNode
from tmover.core.phase import Ended
from tmover.core.roster import Job, Ordered
from tmover.errors import ConfigError, SchedulerError
from tmover.scheduler.interface import NodeInfo, NodeState, Outcome

FENCE = EndNode(job="1", node="node2", reason="lost")
ORDER = OrderNode(job="1", exclude=("node1", "node2"))
AWAY = SchedulerError("slurmctld is away")


def ledger(*effects: Errand, ordered: int = 0) -> Ledger:
    left = dict.fromkeys(("node1", "node2"), time.time())
    made = Ledger(Job(name="1", ordered=Ordered(ordered, 0), left=left))
    made.effects = list(effects)
    return made


def run(
    scheduler: ScriptedScheduler,
    book: Ledger,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Errand]:
    """Pursue what `book` holds, as the controller does, to its end; return what was settled."""
    return [told.effect for told in settle(book, meanwhile=meanwhile, scheduler=scheduler)]


def settle(
    book: Ledger,
    *,
    allocations: ScriptedAllocations | None = None,
    scheduler: ScriptedScheduler | None = None,
    is_there: Callable[[Who], bool] = lambda _: False,
    goodbye_s: float = 60.0,
    again_s: float = 0.001,
    borrow: Callable[[str], Awaitable[str]] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Settled]:
    settled: list[Settled] = []

    async def pursue() -> None:
        queue: asyncio.Queue[Settled] = asyncio.Queue()
        errands = Errands(
            scheduler or ScriptedScheduler(), allocations=allocations, is_there=is_there,
            again_s=again_s, goodbye_s=goodbye_s, post=queue.put_nowait, borrow=borrow,
        )  # fmt: skip
        errands.pursue(book)
        meanwhile()
        while book.effects:
            told = await queue.get()
            settled.append(told)
            book.effects.remove(told.effect)
            errands.settled(told.effect)
            errands.pursue(book)
        await errands.close()

    asyncio.run(asyncio.wait_for(pursue(), timeout=30))
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


def test_an_error_of_our_own_is_logged_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = ScriptedScheduler()
    scheduler.ends = [ZeroDivisionError("ours"), None]

    assert run(scheduler, ledger(FENCE)) == [FENCE]
    assert "could not ask for EndNode" in caplog.text
    assert "ZeroDivisionError: ours" in caplog.text


# --- jobs in allocations --------------------------------------------------------------------------

RELEASE = ReleaseNode(job="1", agent="node2-aa", node="node2", reason="released")
END = EndJob(job="1", code=0, reason="done")


def allocated(*effects: Errand, ordered: int = 0) -> Ledger:
    made = ledger(*effects, ordered=ordered)
    made.job = dataclasses.replace(made.job, allocated=True)
    return made


@pytest.mark.parametrize("effect", [FENCE, ORDER, RELEASE, END])
def test_the_scheduler_s_allocations_serve_the_jobs_that_have_some(effect: Errand) -> None:
    allocations, scheduler = ScriptedAllocations(), ScriptedScheduler()

    settle(allocated(effect, ordered=1), allocations=allocations, scheduler=scheduler)

    assert allocations.errands == [effect]
    assert scheduler.calls == []
    assert threading.main_thread() not in allocations.threads


@pytest.mark.parametrize("effect", [RELEASE, END])
def test_a_local_job_has_nothing_to_give_back(effect: Errand) -> None:
    allocations = ScriptedAllocations()

    assert settle(ledger(effect), allocations=allocations) == [Settled(job="1", effect=effect)]
    assert allocations.errands == []


def test_what_was_done_is_told_with_its_settlement() -> None:
    allocations = ScriptedAllocations()
    allocations.outcomes = [Outcome.done("node2 is given back to Slurm")]

    assert settle(allocated(FENCE), allocations=allocations) == [
        Settled(job="1", effect=FENCE, note="node2 is given back to Slurm")
    ]


def test_what_only_takes_time_is_asked_again_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    allocations = ScriptedAllocations()
    allocations.outcomes = [Outcome.not_yet(), Outcome.not_yet(), Outcome.done()]

    settle(allocated(END), allocations=allocations)

    assert len(allocations.errands) == 3
    assert caplog.text == ""


def test_the_same_trouble_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    allocations, book = ScriptedAllocations(), allocated(ORDER, ordered=1)
    allocations.outcomes = [AWAY, AWAY, ConfigError("no option"), Outcome.done()]

    settle(book, allocations=allocations)

    assert [record.getMessage() for record in caplog.records] == [
        "slurmctld is away, asking again",
        "no option, asking again",
    ]


def test_an_order_is_repeated_without_a_node_that_may_be_used_again() -> None:
    book = allocated(ORDER, ordered=1)
    allocations = ScriptedAllocations()
    allocations.outcomes = [Outcome.not_yet("no node fits"), Outcome.done()]
    asked = allocations.carry_out

    def carry_out(errand: Errand) -> Outcome:
        outcome = asked(errand)
        book.job = dataclasses.replace(book.job, left={"node1": time.time()})
        return outcome

    allocations.carry_out = carry_out  # type: ignore[method-assign]

    assert [told.effect for told in settle(book, allocations=allocations)] == [ORDER]
    assert allocations.errands == [ORDER, msgspec.structs.replace(ORDER, exclude=("node1",))]


def test_an_order_that_is_another_by_now_is_not_put_off() -> None:
    book = allocated(ORDER, ordered=1)

    async def wait() -> bool:
        errands = Errands(ScriptedScheduler(), again_s=0.001, post=lambda _: None)
        waiting = asyncio.ensure_future(errands._wait(book, ORDER, 3600.0))
        await asyncio.sleep(0)
        book.job = dataclasses.replace(book.job, left={"node1": time.time()})
        return await asyncio.wait_for(waiting, timeout=30)

    assert asyncio.run(wait())


def test_what_the_scheduler_does_not_do_is_shown_until_it_does() -> None:
    allocations = ScriptedAllocations()
    allocations.outcomes = [Outcome.not_yet("no node fits")]

    async def pursue() -> None:
        queue: asyncio.Queue[Settled] = asyncio.Queue()
        errands = Errands(
            ScriptedScheduler(), allocations=allocations, again_s=0.001, post=queue.put_nowait
        )
        errands.pursue(allocated(ORDER, ordered=1))
        while not errands.troubles("1"):
            await asyncio.sleep(0.001)
        assert errands.troubles("1") == ("no standby ordered yet: no node fits, asking again",)
        assert errands.troubles("2") == ()
        allocations.outcomes = [Outcome.done()]
        await queue.get()
        assert errands.troubles("1") == ()
        await errands.close()

    asyncio.run(asyncio.wait_for(pursue(), timeout=30))


def test_a_node_is_given_back_once_its_agent_is_gone() -> None:
    allocations = ScriptedAllocations()
    asked: list[Who] = []
    before: list[int] = []

    def is_there(who: Who) -> bool:
        asked.append(who)
        before.append(len(allocations.errands))
        return len(asked) < 5

    settle(allocated(RELEASE), allocations=allocations, is_there=is_there)

    assert asked == [Who("1", "node2-aa")] * 5
    assert before == [0] * 5
    assert allocations.errands == [RELEASE]


def test_an_agent_that_never_goes_does_not_keep_its_node() -> None:
    allocations = ScriptedAllocations()

    settle(allocated(RELEASE), allocations=allocations, is_there=lambda _: True, goodbye_s=0.01)

    assert allocations.errands == [RELEASE]


def test_a_node_to_which_the_job_came_back_is_not_given_back() -> None:
    joined = Joined(job="1", agent="node2-cc", node="node2", address="", nproc=1, standby=False)
    book = allocated(RELEASE)
    allocations = ScriptedAllocations()

    def comes_back() -> None:
        for event in (
            Submitted(job="1", nnodes=1, nproc=1, owner="ann", allocated=True), joined,
        ):  # fmt: skip
            book.job, _ = decide(book.job, event)

    settle(
        book, allocations=allocations, meanwhile=comes_back,
        is_there=lambda who: not book.job.agents,
    )  # fmt: skip

    assert allocations.errands == []


def test_a_job_in_an_allocation_waits_for_a_controller_that_has_slurm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = ScriptedScheduler()
    posted: list[Settled] = []

    async def pursue() -> None:
        errands = Errands(scheduler, again_s=0.001, post=posted.append)
        errands.pursue(allocated(FENCE, END))
        while caplog.text.count("Slurm's commands are not on this machine, asking again") < 2:
            await asyncio.sleep(0.001)
        await errands.close()

    asyncio.run(asyncio.wait_for(pursue(), timeout=30))

    assert (posted, scheduler.calls) == ([], [])


def test_what_takes_time_is_asked_for_less_and_less_often() -> None:
    allocations = ScriptedAllocations()
    allocations.outcomes = [*[Outcome.not_yet()] * 5, Outcome.done()]
    begin = time.monotonic()

    settle(allocated(END), allocations=allocations, again_s=0.01)

    assert time.monotonic() - begin >= 0.01 * (1 + 2 + 4 + 8 + 16)


async def lent(job: str) -> str:
    return f"job 2 lends one to job {job}"


async def not_lent(_job: str) -> str:
    return ""


def test_a_standby_that_another_job_lends_is_not_asked_of_the_scheduler() -> None:
    scheduler = ScriptedScheduler()

    told = settle(ledger(ORDER, ordered=1), scheduler=scheduler, borrow=lent)

    assert [(one.effect, one.note) for one in told] == [(ORDER, "job 2 lends one to job 1")]
    assert scheduler.calls == []


def test_if_none_is_lent_the_scheduler_is_asked() -> None:
    scheduler = ScriptedScheduler()

    settle(ledger(ORDER, ordered=1), scheduler=scheduler, borrow=not_lent)

    assert scheduler.calls == ["order 1 but node1,node2"]


def test_the_scheduler_is_told_whose_a_lent_node_is() -> None:
    scheduler = ScriptedScheduler()

    settle(ledger(ReassignNode(job="1", agent="a", node="node3", to="2")), scheduler=scheduler)

    assert scheduler.calls == ["reassign node3 from 1 to 2"]
