"""The controller's eyes on the scheduler.

A node that drains or fails becomes an event, and so does the end of a job's allocation.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from tmover.controller.orders import Orders
from tmover.controller.presence import Who
from tmover.core.events import (
    CANCELLED,
    AnyEvent,
    CancelRequested,
    MoveRequested,
    NodeLost,
    NodeReady,
)
from tmover.core.phase import Stage
from tmover.core.roster import Job
from tmover.errors import ConfigError, SchedulerError
from tmover.scheduler.interface import Allocation, Allocations, Fate, NodeInfo, NodeState

logger = logging.getLogger(__name__)


_TROUBLED = (NodeState.DRAINING, NodeState.FAILING, NodeState.DOWN)
_MISSED = 3
"""Polls in a row in which the scheduler does not know a job that has no node left."""


class Nodes(Protocol):
    """Whoever knows the states of nodes."""

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes. Raises `SchedulerError`."""
        ...


class Watch:
    """Polls the scheduler. One poller, one snapshot, whatever the number of jobs."""

    def __init__(
        self,
        scheduler: Nodes,
        *,
        poll_s: float,
        agents_on: Callable[[str], Iterable[Who]],
        post: Callable[[AnyEvent], None],
    ) -> None:
        self._scheduler = scheduler
        self._poll_s = poll_s
        self._agents_on = agents_on
        self._post = post
        self._told: set[tuple[Who, NodeState]] = set()
        self._asked: set[tuple[str, str]] = set()
        """The jobs that were asked to leave a node, and the node, until it is in service again."""
        self._is_answering = True

    async def run(self) -> None:
        """Poll for ever."""
        while True:
            try:
                nodes = await asyncio.to_thread(self._scheduler.nodes)
            except (SchedulerError, OSError) as error:
                if self._is_answering:
                    logger.warning("the scheduler did not answer: %s", error)
                self._is_answering = False
            else:
                if not self._is_answering:
                    logger.info("the scheduler answers again")
                self._is_answering = True
                for event in self.events(nodes):
                    self._post(event)
            await asyncio.sleep(self._poll_s)

    def events(self, nodes: Iterable[NodeInfo]) -> list[AnyEvent]:
        """Return what is new: each agent's node is reported once per spell of trouble, and its end.

        So a node that was drained and is resumed stays, if its move has not begun.
        """
        found: list[AnyEvent] = []
        told: set[tuple[Who, NodeState]] = set()
        for node in nodes:
            if node.state.is_usable:
                ready = {asked for asked in self._asked if asked[1] == node.name}
                found += [NodeReady(job=job, node=name) for job, name in sorted(ready)]
                self._asked -= ready
            if node.state not in _TROUBLED:
                continue
            reason = node.reason or f"the scheduler says it is {node.state.value}"
            for who in self._agents_on(node.name):
                told.add((who, node.state))
                if (who, node.state) in self._told:
                    continue
                kind = NodeLost if node.state is NodeState.DOWN else MoveRequested
                found.append(kind(job=who.job, node=node.name, reason=reason))
                if kind is MoveRequested:
                    self._asked.add((who.job, node.name))
        self._told = told
        return list(dict.fromkeys(found))


class AllocationWatch:
    """Looks after jobs in allocations of the scheduler: their nodes, and their own fate."""

    def __init__(
        self,
        allocations: Allocations,
        *,
        poll_s: float,
        live: Callable[[], Mapping[str, Job]],
        agents_on: Callable[[str], Iterable[Who]],
        post: Callable[[AnyEvent], None],
        requeued: Callable[[Job, str], AnyEvent | None],
        is_ordering: Callable[[str], bool],
    ) -> None:
        """`live` are the jobs to look after; `requeued` says how one begins anew.

        `is_ordering` says whether the scheduler is still to be asked for standbys of a job.
        """
        self._allocations = allocations
        self._poll_s = poll_s
        self._live = live
        self._post = post
        self._requeued = requeued
        self._missed: dict[str, _Missed] = {}
        self._jobs: Mapping[str, Job] = {}
        self._orders = Orders(is_ordering)
        self._seen: dict[str, Allocation] = {}
        self._trouble: dict[str, str] = {}
        """Why a requeued job could not begin anew."""
        self._nodes = Watch(
            allocations,
            poll_s=poll_s,
            agents_on=lambda node: [who for who in agents_on(node) if who.job in self._jobs],
            post=post,
        )

    def seen(self, job: str) -> Allocation | None:
        """Return what was last seen of a job."""
        return self._seen.get(job)

    async def run(self) -> None:
        """Poll for ever, as long as there is something to look after."""
        trouble = ""
        while True:
            jobs = dict(self._live())
            try:
                if jobs:
                    nodes = await asyncio.to_thread(self._allocations.nodes)
                    found = await asyncio.to_thread(self._allocations.look, jobs)
                    await self._take(nodes, found)
                    if trouble:
                        logger.info("Slurm answers again")
                trouble = ""
            except (SchedulerError, OSError) as error:
                if not trouble:
                    logger.warning("Slurm did not answer, nothing is concluded: %s", error)
                trouble = str(error)
            except Exception as error:  # one job's trouble is not the others'
                if str(error) != trouble:
                    logger.exception("could not take in what Slurm said")
                trouble = str(error)
            await asyncio.sleep(self._poll_s)

    async def _take(self, nodes: Iterable[NodeInfo], found: Iterable[Allocation]) -> None:
        before, self._missed = self._missed, {}
        self._jobs = self._live()
        self._seen = {one.job: one for one in found}
        for event in self._nodes.events(nodes):
            self._post(event)
        for name, one in self._seen.items():
            if one.fate is Fate.MISSING:
                self._missed[name] = before.get(name, _Missed()).again(one.at)
            job = self._jobs.get(name)
            follows = None if job is None else await self._make_of(job, one)
            if follows is not None:
                self._post(follows)
            if one.fate is Fate.REQUEUED:
                self._jobs = self._live()
        self._orders.forget({*self._jobs})

    async def _make_of(self, job: Job, one: Allocation) -> AnyEvent | None:
        """Return what follows for a job from what is held for it."""
        end = None
        if job.phase.stage is Stage.ENDED:
            if one.fate is Fate.REQUEUED:
                await self._begin_anew(job.name)
            return None
        if one.fate is Fate.REQUEUED and lives_elsewhere(job, one):
            await self._forsake(job.name)
        elif one.fate is not Fate.REQUEUED or await self._begin_anew(job.name):
            end = verdict(job, one, missed=self._missed.get(job.name, _Missed()).times)
        if end is not None:
            return end
        gone = self._orders.look(job, one)
        if gone is not None:
            text = "a standby of job %s is gone before it has joined: it is ordered anew"
            logger.warning(text, job.name, extra={"job_id": job.name})
        return gone

    async def _forsake(self, name: str) -> None:
        """Have the scheduler end a main allocation that it has requeued without need."""
        try:
            await asyncio.to_thread(self._allocations.forsake, name)
        except (SchedulerError, ConfigError, OSError) as error:
            logger.warning("%s, asking again", error, extra={"job_id": name})

    async def _begin_anew(self, name: str) -> bool:
        """Begin a requeued job's next incarnation; return whether the old one may end now."""
        job = self._jobs.get(name)
        if job is None:
            return False
        try:
            successor = await asyncio.to_thread(self._allocations.succeed, name)
            event = self._requeued(job, successor)
        except (SchedulerError, ConfigError, OSError) as error:
            if self._trouble.get(name) != str(error):
                logger.error("job %s cannot begin anew: %s", name, error, extra={"job_id": name})
            self._trouble[name] = str(error)
            return False
        self._trouble.pop(name, None)
        if event is not None:
            self._post(event)
        return True


class _Missed(NamedTuple):
    """In how many polls in a row, the last of which was at `at`, the scheduler knew no such job."""

    times: int = 0
    at: float = -math.inf

    def again(self, at: float) -> _Missed:
        """Count another look, unless it is at what the last poll has told already."""
        return self if at == self.at else _Missed(self.times + 1, at)


def lives_elsewhere(job: Job, found: Allocation) -> bool:
    """Return whether all ranks train on nodes that the main allocation does not have.

    Standbys that have just taken all slots, to start afresh, hold nothing worth keeping.
    """
    if not job.schemas:
        return False
    seated = [job.agents[name].node for name in job.slots if job.is_alive(name)]
    return len(seated) == len(job.slots) and set(seated) <= set(found.standby_nodes)


def verdict(job: Job, found: Allocation, *, missed: int = 0) -> CancelRequested | None:
    """Return the end of a job that its main allocation's fate means, None if it means none.

    An allocation that has ended by itself ends the job only if no slot is held any more: ranks that
    have moved to other allocations train on. Slurm requeues one whose last node it has given up.
    """
    if found.fate is Fate.REQUEUED:
        return CancelRequested(job=job.name, reason=f"{found.text}: it begins anew", code=CANCELLED)
    if found.fate is Fate.STOPPED:
        return CancelRequested(job=job.name, reason=found.text, code=CANCELLED)
    is_over = found.fate is Fate.ENDED or (found.fate is Fate.MISSING and missed >= _MISSED)
    if is_over and not any(job.is_alive(agent) for agent in job.slots):
        return CancelRequested(job=job.name, reason=f"{found.text}, and no node is left", code=1)
    return None
