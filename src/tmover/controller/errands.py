"""What the controller has the scheduler do: fence nodes, give them back, find new ones, end jobs.

A call may take seconds, so it runs in a thread. A call that fails is made again for as long as it
is wanted, however long the scheduler is away; that it succeeded is journaled (`Settled`), so that a
restarted controller goes on with what is left and repeats nothing that was done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable

import msgspec

from tmover.controller.desk import Ledger
from tmover.controller.journal import Settled
from tmover.controller.presence import Who
from tmover.core.draft import avoided
from tmover.core.orders import EndJob, EndNode, Errand, OrderNode, ReassignNode, ReleaseNode
from tmover.core.phase import Stage
from tmover.errors import ConfigError, SchedulerError
from tmover.scheduler.interface import Allocations, Outcome, Scheduler

logger = logging.getLogger(__name__)

_AGAIN_MAX_S = 30.0
_ORDER_AGAIN_MAX_S = 300.0
"""An order that Slurm refuses leaves a failed job behind each time."""
_WAIT_MAX_S = 5.0
"""The longest pause while nothing is wrong: what ends by itself is not asked for every moment."""
_GOODBYE_S = 30.0
"""How long the node of an agent that was let go is not touched while the agent is still there."""


class Errands:
    """Runs the scheduler's calls: one order per job and one fence per node at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        again_s: float,
        post: Callable[[Settled], None],
        allocations: Allocations | None = None,
        is_there: Callable[[Who], bool] = lambda _: False,
        borrow: Callable[[str], Awaitable[str]] | None = None,
        goodbye_s: float = _GOODBYE_S,
    ) -> None:
        """`allocations` serve the jobs that have some; `is_there` says who is still heard of.

        `borrow` gets a job a standby of another one, and says so; "" if none can be had.
        """
        self._scheduler = scheduler
        self._allocations = allocations
        self._is_there = is_there
        self._borrow = borrow
        self._again_s = again_s
        self._goodbye_s = goodbye_s
        self._post = post
        self._busy: set[Hashable] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._troubles: dict[Hashable, tuple[str, str]] = {}
        """The job, and why what is asked for it again and again has not succeeded yet."""

    def pursue(self, ledger: Ledger) -> None:
        """Begin what is left to do for the job."""
        for effect in ledger.effects:
            if _key(effect) not in self._busy:
                self._busy.add(_key(effect))
                task = asyncio.ensure_future(self._run(ledger, effect))
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    def troubles(self, job: str) -> tuple[str, ...]:
        """Return what the scheduler does not do for a job, for as long as it does not."""
        return tuple(text for whose, text in self._troubles.values() if whose == job)

    def settled(self, effect: Errand) -> None:
        """Note that the journal knows that `effect` is done, so that the next can begin."""
        self._busy.discard(_key(effect))

    async def close(self) -> None:
        """Leave the rest to the next controller."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, ledger: Ledger, effect: Errand) -> None:
        """Make the call until it succeeds or is not wanted any more."""
        pause, note, trouble = self._again_s, "", ""
        if isinstance(effect, ReleaseNode):
            await self._see_off(Who(effect.job, effect.agent))
        while _is_wanted(ledger, effect):
            if isinstance(effect, OrderNode) and self._borrow is not None:
                note = await self._borrow(effect.job)
            if note:
                break
            is_done, text = await asyncio.to_thread(self._try, ledger, effect)
            if is_done:
                note = text
                break
            if text and text != trouble:
                logger.warning("%s, asking again", text, extra={"job_id": effect.job})
            trouble = text
            self._trouble(effect, text)
            if await self._wait(ledger, effect, pause):
                pause = self._again_s
                continue
            longest = _ORDER_AGAIN_MAX_S if isinstance(effect, OrderNode) else _AGAIN_MAX_S
            pause = min(pause * 2, longest if text else _WAIT_MAX_S)
        self._trouble(effect, "")
        self._post(Settled(job=effect.job, effect=effect, note=note))

    async def _wait(self, ledger: Ledger, effect: Errand, pause_s: float) -> bool:
        """Wait before the call is made again; return at once, and True, if it is another by now."""
        if not isinstance(effect, OrderNode):
            await asyncio.sleep(pause_s)
            return False
        before, until = (
            avoided(ledger.job, time.time()),
            asyncio.get_running_loop().time() + pause_s,
        )
        while (left := until - asyncio.get_running_loop().time()) > 0:
            if avoided(ledger.job, time.time()) != before or not _is_wanted(ledger, effect):
                return True
            await asyncio.sleep(min(left, self._again_s))
        return False

    def _trouble(self, effect: Errand, text: str) -> None:
        """Keep why the call has not succeeded, if there is a reason."""
        if text:
            what = "no standby ordered yet: " if isinstance(effect, OrderNode) else ""
            self._troubles[_key(effect)] = (effect.job, f"{what}{text}, asking again")
        else:
            self._troubles.pop(_key(effect), None)

    async def _see_off(self, who: Who) -> None:
        """Wait until the agent is gone: its node is taken from it only after its workers' end."""
        deadline = asyncio.get_running_loop().time() + self._goodbye_s
        while self._is_there(who) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - a lease ends
            await asyncio.sleep(self._again_s)

    def _try(self, ledger: Ledger, effect: Errand) -> Outcome:
        """Make the call, in a thread."""
        if isinstance(effect, OrderNode):  # a node may be used again, or not any more, by now
            exclude = avoided(ledger.job, time.time())
            effect = msgspec.structs.replace(effect, exclude=exclude)
        try:
            if ledger.job.allocated:
                if self._allocations is None:
                    return Outcome.not_yet("Slurm's commands are not on this machine")
                return self._allocations.carry_out(effect)
            if isinstance(effect, OrderNode):
                return self._order(effect)
            if isinstance(effect, ReassignNode):
                self._scheduler.reassign(effect.node, effect.job, effect.to)
            return self._end(effect) if isinstance(effect, EndNode) else Outcome.done()
        except (SchedulerError, ConfigError, OSError) as error:
            return Outcome.not_yet(str(error))
        except Exception:  # it is asked again: nothing may be owed for ever without a word
            logger.exception("could not ask for %s", effect)
            return Outcome.not_yet("an internal error, see the log")

    def _order(self, effect: OrderNode) -> Outcome:
        node = self._scheduler.order(effect.job, effect.exclude)
        if node is None:
            return Outcome.not_yet(f"no node is free for a standby of job {effect.job}")
        logger.info("ordered %s for job %s", node, effect.job, extra={"job_id": effect.job})
        return Outcome.done()

    def _end(self, effect: EndNode) -> Outcome:
        """Fence the node, unless it carries another job by now."""
        jobs = {node.job for node in self._scheduler.nodes() if node.name == effect.node}
        if jobs <= {"", effect.job}:
            self._scheduler.end(effect.node, effect.reason)
            logger.info("fenced %s", effect.node, extra={"job_id": effect.job})
        return Outcome.done()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a call of the scheduler failed", exc_info=task.exception())


def _is_wanted(ledger: Ledger, effect: Errand) -> bool:
    """Return whether the job still waits for it.

    An order is moot once enough standbys came or the job has ended; a fence, and giving a node
    back, once the job has an agent there again.
    """
    job = ledger.job
    if effect not in ledger.effects:
        return False
    if isinstance(effect, OrderNode):
        return job.ordered.nodes > 0 and job.phase.stage is not Stage.ENDED
    if isinstance(effect, EndJob | ReassignNode):
        return True
    return all(agent.node != effect.node for agent in job.agents.values())


def _key(effect: Errand) -> Hashable:
    """Return what is not asked twice at the same time."""
    return effect.job if isinstance(effect, OrderNode) else effect
