"""Standbys that jobs share: which job may have one of another's, and when.

Jobs of one owner that name the same pool lend each other standbys. One that a job cannot train on
without goes there from any job that trains and needs it less; one that a job only keeps in reserve
goes there from a job that has more than it keeps. The lender orders another one for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tmover.core import standby, waiting
from tmover.core.draft import UNFIT, Draft, avoided
from tmover.core.phase import Ended, Forming, Training, Waiting
from tmover.core.roster import Agent, Job, lent_name

LENT_S = 60.0
"""For so long a standby that was lent is on its way; one that has not come then never will."""

STRANGE = 2
"""Lent standbys in a row that cannot run what a job runs: then it is lent no more."""


class Loan(NamedTuple):
    """A standby that goes from one job to another."""

    lender: str
    agent: str
    node: str


def partners(jobs: Iterable[Job], job: Job) -> list[Job]:
    """Return the jobs that may lend to `job`, and borrow of it."""
    return [other for other in jobs if _are_of_one_pool(other, job)]


def needs(job: Job) -> int:
    """Return how many nodes the job cannot go on without, beyond those that are here already."""
    here = len([agent for agent in standby.spare(job) if agent.node not in job.requests])
    if isinstance(job.phase, Forming):
        return max(0, len(job.phase.vacated) - here)
    if isinstance(job.phase, Waiting):
        here += len(waiting.returning(job))
    return max(0, len(standby.wanted(job)) - here)


def idle(job: Job) -> list[Agent]:
    """Return the standbys that the job could do without for now, those that rest."""
    if not isinstance(job.phase, Training) or standby.wanted(job):
        return []
    return [
        agent
        for agent in standby.spare(job)
        if agent.is_ready and agent.node not in job.requests and agent.node not in job.slow
    ]


def loan(jobs: Sequence[Job], borrower: Job, now: float) -> Loan | None:
    """Return which standby `borrower` may have of another job, None if it needs none or none is.

    `now` is the controller's wall clock.
    """
    others = partners(jobs, borrower)
    coming = len(underway(others, borrower, now))
    is_needed = needs(borrower) > coming
    reserve = borrower.reserve - len(standby.spare(borrower)) - coming
    if (not is_needed and reserve <= 0) or _is_hopeless(borrower):
        return None
    avoid = avoided(borrower, now)
    found: list[tuple[int, Loan]] = []
    for job in others:
        more = len(standby.spare(job)) - job.reserve
        if is_needed or more > 0:
            usable = [agent for agent in idle(job) if agent.node not in avoid]
            found += [(more, Loan(job.name, agent.name, agent.node)) for agent in usable[:1]]
    return max(found, key=lambda each: each[0], default=(0, None))[1]


def underway(others: Iterable[Job], borrower: Job, now: float) -> list[str]:
    """Return the agents that were lent to a job and have not come there yet."""
    return [
        agent
        for job in others
        for agent, farewell in job.gone.items()
        if farewell.to == borrower.name
        and now - farewell.at < LENT_S
        and lent_name(agent) not in borrower.agents
        and lent_name(agent) not in borrower.gone
    ]


def lend(draft: Draft, agent: str, to: str) -> None:
    """Let a standby go to another job, unless it is needed here by now."""
    found = next((each for each in idle(draft.job) if each.name == agent), None)
    if found is not None:
        draft.lend(found, to)


def _is_hopeless(job: Job) -> bool:
    """Return whether others' standbys cannot run what the job runs: they would be used up."""
    return job.unfit >= UNFIT or job.strange >= STRANGE


def _are_of_one_pool(job: Job, borrower: Job) -> bool:
    """Return whether a job may lend to another. A node's workers are as many in both."""
    mine, theirs = ((each.pool, each.owner, each.nproc, each.allocated) for each in (job, borrower))
    is_live = not isinstance(job.phase, Ended)
    return is_live and bool(job.pool) and job.name != borrower.name and mine == theirs
