"""The controller's eyes on who is slow: gathers what ranks say, and has it shown or acted on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from tmover.config import ControllerConfig
from tmover.controller.presence import Presence, Who
from tmover.core.events import Straggling
from tmover.core.phase import Ended, Training
from tmover.core.progress import Progress
from tmover.core.roster import Job
from tmover.core.straggler import (
    Criteria,
    Load,
    Mode,
    OwnStatus,
    Watch,
    hindrance,
    look,
    remedy,
    sentence,
)


class Stragglers:
    """Looks at one job after another, again and again. Times are the caller's, in seconds."""

    def __init__(
        self,
        config: ControllerConfig,
        presence: Presence,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: the wall clock, which outlives this controller."""
        self._mode = Mode(config.stragglers)
        self._criteria = Criteria(config.straggler_margin, config.straggler_for_s)
        self._cooldown_s = config.straggler_cooldown_s
        self._presence = presence
        self._clock = clock
        self._watches: dict[str, Watch] = {}
        self._shown: dict[str, tuple[OwnStatus, ...]] = {}
        self._told: dict[str, Straggling] = {}
        """What was said last of a job, as long as the node is slow."""

    def look(self, job: Job, now: float) -> list[Straggling]:
        """Return what is to be said of the job now: once, or again when it can be acted on."""
        if self._mode is Mode.OFF or isinstance(job.phase, Ended):
            self._drop(job.name)
            return []
        before = self._watches.get(job.name, Watch())
        watch = look(before, job.in_force, self._loads(job), self._criteria, at=now)
        worst = watch.certain(self._criteria, now)
        self._watches[job.name] = watch
        self._shown[job.name] = tuple(
            self._status(job, agent, now) for agent in job.slots if agent in watch.found
        )
        if worst is None:
            self._told.pop(job.name, None)
            return []
        return self._news(job, worst)

    def forget(self) -> None:
        """Begin anew with what is slow now: nobody has looked for a while."""
        self._watches = {
            name: Watch(epoch=watch.epoch, past=watch.past) for name, watch in self._watches.items()
        }

    def of(self, job: str) -> tuple[OwnStatus, ...]:
        """Return how the nodes of a job do, by slot."""
        return self._shown.get(job, ())

    def sentence(self, job: str) -> str:
        """Return which node of a job is a straggler, and what would help; "" if none is."""
        told = self._told.get(job)
        slow = next((one for one in self.of(job) if one.is_straggler), None)
        if told is None or slow is None:
            return ""
        if told.act:
            return f"{told.reason}: it is to be moved"
        if told.hindrance:
            return f"{told.reason}: it is not moved, {told.hindrance}"
        return f"{told.reason}: {remedy(slow.node)}"

    # --- inside -----------------------------------------------------------------------------------

    def _drop(self, job: str) -> None:
        for kept in (self._watches, self._shown, self._told):
            kept.pop(job, None)

    def _loads(self, job: Job) -> list[Load]:
        """Return what all ranks say of the world in force; nothing unless all can and it trains."""
        ranks = progress_of(job, self._presence)
        settled = all(said.epoch == job.in_force and said.own_s > 0 for said in ranks.values())
        whole = len(ranks) == job.nnodes * job.nproc > 0
        if not isinstance(job.phase, Training) or job.requests or not (whole and settled):
            return []
        return [
            Load(rank, job.slots[rank // job.nproc], _role(job, rank), said.own_s)
            for rank, said in ranks.items()
        ]

    def _status(self, job: Job, agent: str, now: float) -> OwnStatus:
        watch = self._watches[job.name]
        finding, since = watch.found[agent], watch.since.get(agent)
        return OwnStatus(
            node=job.agents[agent].node,
            own_ms=round(finding.own_s * 1000, 3),
            usual_ms=round(finding.usual_s * 1000, 3),
            ratio=round(finding.ratio, 3),
            against=finding.against.value,
            since=0.0 if since is None else round(self._clock() - (now - since), 1),
            is_straggler=agent == watch.certain(self._criteria, now),
        )

    def _news(self, job: Job, agent: str) -> list[Straggling]:
        """Return what is to be said of a straggler, unless it was said last."""
        slow = next(one for one in self._shown[job.name] if one.is_straggler)
        since = time.strftime("%H:%M", time.localtime(slow.since))
        is_acting = self._mode is Mode.ACT
        why = self._hindrance(job, agent) if is_acting else ""
        news = Straggling(
            job=job.name,
            agent=agent,
            epoch=job.in_force,
            reason=sentence(slow, since),
            act=is_acting and not why,
            hindrance=why,
        )
        told = self._told.get(job.name)
        if told is not None and replace(told, reason=news.reason) == news:
            return []
        self._told[job.name] = news
        return [news]

    def _hindrance(self, job: Job, agent: str) -> str:
        wall = self._clock()
        last = max((acts.at for acts in job.acted.values()), default=-math.inf)
        if wall - last < self._cooldown_s:
            return f"a straggler was moved less than {self._cooldown_s:g} s ago"
        return hindrance(job, agent, wall)


def progress_of(job: Job, presence: Presence) -> Mapping[int, Progress]:
    """Return what the ranks of a job have said of themselves last, by rank, as far as they have."""
    found = {}
    for slot, agent in enumerate(job.slots):
        seen = presence.seen(Who(job.name, agent))
        for local, said in enumerate(() if seen is None else seen.progress[: job.nproc]):
            rank = slot * job.nproc + local
            if said is not None and said.rank == rank:
                found[rank] = said
    return found


def _role(job: Job, rank: int) -> str:
    """Return what is the same for ranks that do the same work: what they track, and its shape."""
    return repr(sorted(job.schemas.get(rank, {}).items()))
