"""The controller's clock: whose lease is over, who stands still, which job lacks a standby."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from tmover.controller.desk import Desk
from tmover.controller.lending import Lending
from tmover.controller.presence import Presence
from tmover.controller.suspects import Suspects
from tmover.core.events import LeaseExpired, Straggling, Stuck

logger = logging.getLogger(__name__)

_UNREAD_LEASES = 5
"""So many leases at most nobody is missed because there is more to read than can be read."""
_LOOK_S = 1.0
"""So often at most all ranks are compared: nobody is suspected within seconds."""


class Vigil:
    """Looks at what time alone brings about. Its clock is the event loop's."""

    def __init__(
        self,
        lease_s: float,
        *,
        desk: Desk,
        presence: Presence,
        suspects: Suspects,
        lending: Lending,
        is_behind: Callable[[], bool],
        post: Callable[[LeaseExpired | Stuck | Straggling], None],
    ) -> None:
        """`is_behind`: whether more may have been said than was read."""
        self._lease_s = lease_s
        self._desk = desk
        self._presence = presence
        self._suspects = suspects
        self._lending = lending
        self._is_behind = is_behind
        self._post = post
        self._current = 0.0
        """When all that had been said was read last."""
        self._compared = 0.0

    async def run(self) -> NoReturn:
        """Look for ever."""
        now = self._current = _now()
        while True:
            before = now
            await asyncio.sleep(self._lease_s / 10)
            now = _now()
            self._look(now, stood_s=now - before)

    def _look(self, now: float, *, stood_s: float) -> None:
        """Miss agents whose lease is over, unless it was this process that did not run."""
        if stood_s > self._lease_s / 3:
            logger.warning("stood still for %.1f s, all leases begin anew", stood_s)
            self._presence.extend(now)
        if self._is_behind() and now - self._current < _UNREAD_LEASES * self._lease_s:
            return  # what an agent has said may wait to be read
        self._current = now
        for who in self._presence.expire(now):
            text = "agent %s was not heard of for lease_s (%s s)"
            logger.warning(text, who.agent, self._lease_s, extra={"job_id": who.job})
            self._post(LeaseExpired(job=who.job, agent=who.agent))
        self._lending.look()
        if now - self._compared >= min(self._lease_s / 4, _LOOK_S):
            self._compared = now
            for found in self._suspects.look(self._desk.jobs(), now):
                self._post(found)


def _now() -> float:
    return asyncio.get_running_loop().time()
