"""Standbys that jobs of one pool lend each other, carried out: `core.pool` says who lends whom.

A loan is an event of the lender, so that a journal gives it again. The scheduler is told first
whose node it is, the agent after that: it joins the other job as a standby, and is told there what
that job runs, as one of the job's own agents has said.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tmover import wire
from tmover.controller.desk import Desk
from tmover.controller.journal import Settled
from tmover.core import pool
from tmover.core.events import Joined, Lent
from tmover.core.orders import Lend, OrderNode, ReassignNode
from tmover.core.phase import Stage
from tmover.core.roster import lent_name

_POLL_S = 0.05
_SETTLED_S = 30.0
"""So long a loan may take; the scheduler is asked for another node then."""


class Lending:
    """Knows what the jobs with a pool run."""

    def __init__(
        self, desk: Desk, post: Callable[[Lent], None], *, settled_s: float = _SETTLED_S
    ) -> None:
        self._desk = desk
        self._post = post
        self._settled_s = settled_s
        self._programs: dict[str, wire.Program] = {}

    def hear(self, program: wire.Program) -> None:
        """Take note of what a job runs."""
        ledger = self._desk.ledgers.get(program.job)
        if ledger is not None and ledger.job.pool:
            self._programs[program.job] = program

    def greeting(self, joined: Joined, boot: str, secret: bytes) -> wire.Greeting:
        """Return what an agent is told first."""
        name = joined.job
        return wire.Greeting(
            job=name,
            agent=joined.agent,
            boot=boot,
            secret=secret,
            pool=self._desk.ledgers[name].job.pool,
            program=self._programs.get(name) if joined.standby else None,
        )

    def look(self) -> None:
        """Have standbys lent to the jobs that need one."""
        live = {
            name
            for name, ledger in self._desk.ledgers.items()
            if ledger.job.pool and ledger.job.phase.stage is not Stage.ENDED
        }
        self._programs = {name: self._programs[name] for name in self._programs.keys() & live}
        for name in sorted(live):
            if pool.needs(self._desk.ledgers[name].job):
                self._lend_to(name)

    async def borrow(self, name: str) -> str:
        """Have a standby lent to a job; say so once it is on its way, "" if none can be had."""
        if coming := self._covering(name):
            return f"standby {coming} is lent already"
        loan = self._lend_to(name)
        deadline = asyncio.get_running_loop().time() + self._settled_s
        while (
            loan is not None and asyncio.get_running_loop().time() < deadline
        ):  # it becomes the lender's event
            ledger = self._desk.ledgers[loan.lender]
            farewell = ledger.job.gone.get(loan.agent)
            is_on_its_way = farewell is not None and farewell.to == name
            if is_on_its_way and not any(_is_of(effect, loan.agent) for effect in ledger.effects):
                return f"standby {loan.node} is lent by job {loan.lender}"
            if not is_on_its_way and all(a.name != loan.agent for a in pool.idle(ledger.job)):
                break
            await asyncio.sleep(_POLL_S)
        return ""

    def _covering(self, name: str) -> str:
        """Return the standby on its way that was lent for an order of which nobody knows it."""
        ledger, jobs = self._desk.ledgers[name], self._desk.jobs()
        coming = pool.underway(pool.partners(jobs, ledger.job), ledger.job, time.time())
        unsettled = sum(isinstance(effect, OrderNode) for effect in ledger.effects)
        settled = max(0, ledger.job.ordered.nodes - unsettled)  # losses may have come since
        return coming[-1] if len(coming) > settled else ""

    def _lend_to(self, name: str) -> pool.Loan | None:
        if name not in self._programs:
            return None
        jobs = self._desk.jobs()
        loan = pool.loan(jobs, self._desk.ledgers[name].job, time.time())
        if loan is not None:
            self._post(Lent(job=loan.lender, agent=loan.agent, to=name))
        return loan


def order_after(entry: object) -> list[Lend]:
    """Return what an agent is told once the scheduler knows whose node it is on."""
    if not isinstance(entry, Settled) or not isinstance(entry.effect, ReassignNode):
        return []
    lent = entry.effect
    name = lent_name(lent.agent)
    return [Lend(job=lent.job, agent=lent.agent, to=lent.to, name=name, afresh=lent.afresh)]


def _is_of(effect: object, agent: str) -> bool:
    return isinstance(effect, ReassignNode) and effect.agent == agent
