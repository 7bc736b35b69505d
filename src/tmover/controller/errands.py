"""What the controller has the scheduler do: fence nodes, and find new ones.

A call may take seconds, so it runs in a thread. A call that fails is made again for as long as it
is wanted, however long the scheduler is away; that it succeeded is journaled (`Settled`), so that a
restarted controller goes on with what is left and repeats nothing that was done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable

from tmover.controller.desk import Ledger
from tmover.controller.journal import Settled
from tmover.core.events import EndNode, Errand, OrderNode
from tmover.core.phase import Stage
from tmover.errors import SchedulerError
from tmover.scheduler.interface import Scheduler

logger = logging.getLogger(__name__)

_AGAIN_MAX_S = 30.0


class Errands:
    """Runs the scheduler's calls: one order per job and one fence per node at a time."""

    def __init__(
        self, scheduler: Scheduler, *, again_s: float, post: Callable[[Settled], None]
    ) -> None:
        self._scheduler = scheduler
        self._again_s = again_s
        self._post = post
        self._busy: set[Hashable] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def pursue(self, ledger: Ledger) -> None:
        """Begin what is left to do for the job."""
        for effect in ledger.effects:
            if _key(effect) not in self._busy:
                self._busy.add(_key(effect))
                task = asyncio.ensure_future(self._run(ledger, effect))
                self._tasks.add(task)
                task.add_done_callback(self._ended)

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
        pause = self._again_s
        while _is_wanted(ledger, effect):
            trouble = await asyncio.to_thread(self._try, effect)
            if not trouble:
                break
            logger.warning("%s, asking again", trouble, extra={"job_id": effect.job})
            await asyncio.sleep(pause)
            pause = min(pause * 2, _AGAIN_MAX_S)
        self._post(Settled(job=effect.job, effect=effect))

    def _try(self, effect: Errand) -> str:
        """Make the call, in a thread; return why it came to nothing, or ""."""
        try:
            return self._order(effect) if isinstance(effect, OrderNode) else self._end(effect)
        except (SchedulerError, OSError) as error:
            return str(error)

    def _order(self, effect: OrderNode) -> str:
        node = self._scheduler.order(effect.job, effect.exclude)
        if node is None:
            return f"no node is free for a standby of job {effect.job}"
        logger.info("ordered %s for job %s", node, effect.job, extra={"job_id": effect.job})
        return ""

    def _end(self, effect: EndNode) -> str:
        """Fence the node, unless it carries another job by now."""
        jobs = {node.job for node in self._scheduler.nodes() if node.name == effect.node}
        if jobs <= {"", effect.job}:
            self._scheduler.end(effect.node, effect.reason)
            logger.info("fenced %s", effect.node, extra={"job_id": effect.job})
        return ""

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a call of the scheduler failed", exc_info=task.exception())


def _is_wanted(ledger: Ledger, effect: Errand) -> bool:
    """Return whether the job still waits for it.

    An order is moot once enough standbys came or the job has ended; a fence, once the job has an
    agent there again.
    """
    job = ledger.job
    if effect not in ledger.effects:
        return False
    if isinstance(effect, OrderNode):
        return job.ordered.nodes > 0 and job.phase.stage is not Stage.ENDED
    return all(agent.node != effect.node for agent in job.agents.values())


def _key(effect: Errand) -> Hashable:
    """Return what is not asked twice at the same time."""
    return effect if isinstance(effect, EndNode) else effect.job
