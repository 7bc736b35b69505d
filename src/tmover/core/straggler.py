"""Which node is slower than its peers, and what is done about it. Pure rules.

Every rank says how long its own part of a step takes, without any wait for others. It is compared
with the ranks of the other nodes that track the same: the stages of a pipeline may differ. Where a
job has too few nodes of a kind for that, a rank is compared with its own past, as far as the others
have not become slower as well. A node is as slow as its slowest rank.

What was found counts in one world only. Nothing is found while a move or a recovery is under way,
and after it all ranks have to say anew how they do.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tmover.core import move, standby
from tmover.core.draft import LEFT_S, Draft
from tmover.core.events import MoveRequested, Straggling
from tmover.core.phase import Training
from tmover.core.roster import Acts, Job

FEW = 3
"""On fewer nodes than this nobody can say which of them is the odd one."""
PAST = 20
"""So many looks, spread over `for_s`, are a rank's own past."""
ACTS = 2
"""A slot that was moved so often for slowness is at fault itself, whatever node holds it."""


class Mode(str, enum.Enum):
    """What is done about a straggler: `[controller] stragglers`."""

    OFF = "off"
    OBSERVE = "observe"
    ACT = "act"


class Criteria(NamedTuple):
    """When a node is a straggler."""

    margin: float
    """Its own time is more than so many times that of its peers."""
    for_s: float
    """For so long."""

    @property
    def clear(self) -> float:
        """Below this it is none any more: half way between the margin and all being equal."""
        return 1 + (self.margin - 1) / 2


class Load(NamedTuple):
    """What one rank has said of itself."""

    rank: int
    agent: str
    role: str
    """Ranks of one role do the same work."""
    own_s: float


class Against(str, enum.Enum):
    """What a node is compared with."""

    PEERS = "peers"
    PAST = "past"
    NOTHING = ""
    """It cannot be judged: it has too few peers, and no past yet."""


class Finding(NamedTuple):
    """How the slowest rank of a node does."""

    ratio: float
    """Its own time by what it should be; 0 if that is not known."""
    own_s: float
    usual_s: float
    against: Against


class Past(NamedTuple):
    """What one rank has said in its first settled time."""

    values: tuple[float, ...] = ()
    at: float = 0.0

    def seen(self, own_s: float, at: float, for_s: float) -> Past:
        """Return it after another look."""
        is_due = not self.values or at - self.at >= for_s / PAST
        full = len(self.values) >= PAST
        return self if full or not is_due else Past((*self.values, own_s), at)

    @property
    def usual_s(self) -> float | None:
        """The median of it, once there is enough."""
        return statistics.median(self.values) if len(self.values) >= PAST else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is known of one job, in seconds of whoever looks."""

    epoch: int = 0
    past: Mapping[tuple[str, int], Past] = dataclasses.field(default_factory=dict)
    """By agent and rank."""
    found: Mapping[str, Finding] = dataclasses.field(default_factory=dict)
    """By agent."""
    since: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Since when an agent has been slower than the margin, without having recovered."""

    def certain(self, criteria: Criteria, at: float) -> str | None:
        """Return the agent that is the straggler, the worst one if there are several."""
        long = [agent for agent, since in self.since.items() if at - since >= criteria.for_s]
        return max(long, key=lambda agent: self.found[agent].ratio, default=None)


def look(
    watch: Watch, epoch: int, loads: Sequence[Load], criteria: Criteria, *, at: float
) -> Watch:
    """Return what is known after another look. No loads: nothing can be said at the moment."""
    if not loads:
        return Watch(epoch=epoch, past=watch.past)
    past = {
        (load.agent, load.rank): watch.past.get((load.agent, load.rank), Past()).seen(
            load.own_s, at, criteria.for_s
        )
        for load in loads
    }
    found = _findings(loads, past)
    before = watch.since if watch.epoch == epoch else {}
    since = {
        agent: before.get(agent, at)
        for agent, finding in found.items()
        if finding.ratio > criteria.margin or (agent in before and finding.ratio > criteria.clear)
    }
    return Watch(epoch=epoch, past=past, found=found, since=since)


def _findings(loads: Sequence[Load], past: Mapping[tuple[str, int], Past]) -> dict[str, Finding]:
    """Return the worst of each agent's ranks, and of those that are equally bad the slowest."""
    worst: dict[str, Finding] = {}
    growth = _growth(loads, past)
    for peers in _by_role(loads):
        for load in peers.loads:
            finding = peers.beside(load) or _beside_past(load, growth)
            worst[load.agent] = max(worst.get(load.agent, finding), finding)
    return worst


class _Peers:
    """The ranks of one role, sorted once: a job may have thousands."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        ordered = sorted((load.own_s, load.agent) for load in loads)
        self._sorted = [own_s for own_s, _ in ordered]
        self._places: dict[str, list[int]] = {}
        """Where an agent's own ranks stand among them, in order."""
        for place, (_, agent) in enumerate(ordered):
            self._places.setdefault(agent, []).append(place)

    def beside(self, load: Load) -> Finding | None:
        """Compare a rank with the others, on other nodes; None if they are too few."""
        if len(self._places) < FEW:
            return None
        usual_s = self._median_without(self._places[load.agent])
        return Finding(load.own_s / usual_s, load.own_s, usual_s, Against.PEERS)

    def _median_without(self, places: Sequence[int]) -> float:
        last = len(self._sorted) - len(places) - 1
        middle = (last // 2, (last + 1) // 2)
        return sum(self._sorted[_shifted(index, places)] for index in middle) / 2


def _shifted(index: int, without: Sequence[int]) -> int:
    """Return where what comes at `index` stands, if what is `without` counts as well.

    >>> [_shifted(index, [0, 3]) for index in range(3)]
    [1, 2, 4]
    """
    for place in without:
        index += place <= index
    return index


def _by_role(loads: Iterable[Load]) -> list[_Peers]:
    found: dict[str, list[Load]] = {}
    for load in loads:
        found.setdefault(load.role, []).append(load)
    return [_Peers(some) for some in found.values()]


def _growth(
    loads: Iterable[Load], past: Mapping[tuple[str, int], Past]
) -> dict[tuple[str, int], float]:
    """Return by how much each rank has become slower, as far as its past is known."""
    known = {(load.agent, load.rank): load.own_s for load in loads}
    usual = {key: past[key].usual_s for key in known}
    return {key: own_s / was for key, own_s in known.items() if (was := usual[key])}


def _beside_past(load: Load, growth: Mapping[tuple[str, int], float]) -> Finding:
    """Compare a rank with its own past: what all others have in common is not held against it."""
    own = growth.get((load.agent, load.rank))
    others = [value for (agent, _), value in growth.items() if agent != load.agent]
    if own is None or not others:
        return Finding(0.0, load.own_s, 0.0, Against.NOTHING)
    ratio = min(own, own / statistics.median(others))
    return Finding(ratio, load.own_s, load.own_s / ratio, Against.PAST)


# --- what follows ---------------------------------------------------------------------------------


def hindrance(job: Job, agent: str, at: float) -> str:
    """Return why a straggler is not moved now, "" if it can be. `at` is the wall clock."""
    slot = job.slots.index(agent)
    acts = job.acted.get(slot, Acts())
    if acts.times >= ACTS and at - acts.at < LEFT_S:
        return (
            f"slot {slot} was moved for that {acts.times} times already: what is slow is the slot, "
            "not its node"
        )
    if job.requests:
        return "another move is to be done first"
    if job.finished:
        return "ranks have finished"
    fit = [one for one in standby.candidates(job, slot) if one.node not in job.slow]
    return "" if fit else "no standby is warm that could take its place"


def hear(draft: Draft, event: Straggling) -> None:
    """Say which node is slow, or move it if that is asked for and can be done."""
    job = draft.job
    is_training = isinstance(job.phase, Training) and event.epoch == job.in_force
    if not is_training or event.agent not in job.slots:
        return
    node = job.agents[event.agent].node
    if node in job.requests:
        return
    why = hindrance(job, event.agent, draft.at) if event.act else event.hindrance
    if not event.act and not why:
        draft.note(f"{event.reason}: {remedy(node)}")
    elif why:
        draft.note(f"{event.reason}: it is not moved, {why}")
    else:
        slot = job.slots.index(event.agent)
        acts = job.acted.get(slot, Acts())
        times = acts.times + 1 if draft.at - acts.at < LEFT_S else 1
        draft.set(
            acted={**job.acted, slot: Acts(times, draft.at)}, slow={**job.slow, node: draft.at}
        )
        move.request(draft, MoveRequested(job=job.name, node=node, reason=event.reason))


# --- how it is shown ------------------------------------------------------------------------------


class OwnStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How long a node's own part of a step takes, beside what it should: of its slowest rank."""

    node: str
    own_ms: float
    usual_ms: float
    """The median of its peers, or what its past makes one expect; 0 if neither is known."""
    ratio: float
    """The first by the second."""
    against: str
    """What it is compared with: "peers", its own "past", or "" if it cannot be judged."""
    since: float = 0.0
    """Since when it has been slower than the margin, in seconds of Unix; 0 if it is not."""
    is_straggler: bool = False
    """Whether it has been for long enough."""


def sentence(status: OwnStatus, since: str) -> str:
    """Return in words that a node is slow; `since` is the time of day."""
    peers = "its peers" if status.against == Against.PEERS.value else "it was (others are not)"
    usual = "peers" if status.against == Against.PEERS.value else "usual"
    return (
        f"{status.node} is {status.ratio:.1f} x slower than {peers} since {since} "
        f"(own {_ms(status.own_ms)}, {usual} {_ms(status.usual_ms)})"
    )


def remedy(node: str) -> str:
    """Return what a person can do about it."""
    return f"`tmover migrate {node}` would move it"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"
