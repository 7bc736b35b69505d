"""What the gate hears, as far as it may be said so often; and a note of what is refused."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import NoReturn

from tmover import wire
from tmover.controller import limits
from tmover.controller.gate import Gate
from tmover.controller.intake import Intake
from tmover.controller.rights import Rights
from tmover.controller.work import Said

logger = logging.getLogger(__name__)


class Admission:
    """Posts what was said."""

    def __init__(
        self,
        gate: Gate,
        rights: Rights,
        intake: Intake,
        *,
        boot: str,
        post: Callable[[Said], None],
    ) -> None:
        self._gate = gate
        self._rights = rights
        self._intake = intake
        self._boot = boot
        self._post = post
        self._rates = limits.Rates()

    async def run(self) -> NoReturn:
        """Listen for ever."""
        while True:
            said = Said(*await self._gate.receive())
            now = asyncio.get_running_loop().time()
            must_vouch = self._rights.must_vouch(said.user, said.message)
            if not self._rates.admits(said.route, said.user, now):
                self._slow_down(said, now)
            elif isinstance(said.message, wire.SubmitRequest) and must_vouch:
                then = functools.partial(self._vouched, said)
                self._intake.vouch(said.user, said.message, then)
            else:
                self._post(said)

    def note(self, said: Said, reason: str) -> None:
        """Note that something was refused."""
        what = type(said.message).__name__
        job = None if isinstance(said.message, wire.SubmitRequest) else said.message.job
        if self._gate.audit.refuse(said.user, what, job, reason):
            logger.warning("refused %s: %s", what, reason)

    def _slow_down(self, said: Said, now: float) -> None:
        if self._rates.must_tell(said.route, now):
            self.note(said, "it says too much")
            self._gate.send(said.route, limits.too_much(said.message, self._boot))

    def _vouched(self, said: Said, refusal: str) -> None:
        if refusal:
            self.note(said, refusal)
            self._gate.send(said.route, wire.RefusedReply(text=refusal))
        else:
            self._post(said)
