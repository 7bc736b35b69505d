"""What is kept of a job that has ended: what people are shown, and what late agents are told."""

from __future__ import annotations

import dataclasses

from tmover.core.events import Plan
from tmover.core.phase import Ended
from tmover.core.roster import Agent, Job

_KEPT = (
    "name", "nnodes", "nproc", "owner", "reserve", "pool", "allocated", "phase", "epoch", "slots",
    "gone", "keepers", "copies", "placing", "incidents",
)  # fmt: skip


def remains(job: Job) -> Job:
    """Return the job without what its ranks tracked, reported and kept, if it has ended."""
    if not isinstance(job.phase, Ended):
        return job
    plan = None if job.plan is None else Plan(epoch=job.plan.epoch, members=())
    agents = {name: _remains(agent) for name, agent in job.agents.items()}
    kept = {name: getattr(job, name) for name in _KEPT}
    return Job(**kept, plan=plan, agents=agents)


def _remains(agent: Agent) -> Agent:
    """Return who the agent was, without what its workers were."""
    return dataclasses.replace(
        agent, endpoints=(), schemas={}, warmth={}, recorded={}, rehearsed=frozenset(), proofs={}
    )
