"""The controller's eyes on the scheduler: a node that drains or fails becomes an event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from tmover.controller.presence import Who
from tmover.core.events import AnyEvent, MoveRequested, NodeLost
from tmover.errors import SchedulerError
from tmover.scheduler.interface import NodeInfo, NodeState, Scheduler

logger = logging.getLogger(__name__)


class Watch:
    """Polls the scheduler. One poller, one snapshot, whatever the number of jobs."""

    def __init__(
        self,
        scheduler: Scheduler,
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
        """Return what is new: each agent's node is reported once per spell of trouble."""
        found: list[AnyEvent] = []
        told: set[tuple[Who, NodeState]] = set()
        for node in nodes:
            if node.state not in (NodeState.DRAINING, NodeState.DOWN):
                continue
            reason = node.reason or f"the scheduler says it is {node.state.value}"
            for who in self._agents_on(node.name):
                told.add((who, node.state))
                if (who, node.state) in self._told:
                    continue
                kind = MoveRequested if node.state is NodeState.DRAINING else NodeLost
                found.append(kind(job=who.job, node=node.name, reason=reason))
        self._told = told
        return list(dict.fromkeys(found))
