"""What tmover asks of a scheduler, in Slurm's words.

Every call is idempotent or says why not, may take seconds, and raises `SchedulerError` with what to
do. A node that the scheduler does not know is an error; a job it does not know is none: missing is
not finished.
"""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tmover import wire
from tmover.core.orders import Errand


class NodeState(str, enum.Enum):
    """The state of a node, as Slurm calls it."""

    IDLE = "idle"
    ALLOCATED = "allocated"
    DRAINING = "draining"
    """It is to be left, and a job still runs on it: the window of a planned move."""
    DRAINED = "drained"
    FAILING = "failing"
    """It is to be left at once; what runs on it may go on."""
    DOWN = "down"
    """Nothing runs on it any more."""
    UNKNOWN = "unknown"

    @property
    def is_usable(self) -> bool:
        """Whether ranks may stay on the node."""
        return self in (NodeState.IDLE, NodeState.ALLOCATED)


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    name: str
    address: str
    state: NodeState
    reason: str = ""
    """Why it is drained or down."""
    job: str = ""
    """The job it is allocated to, "" if none."""


class Scheduler(Protocol):
    """What the controller and `tmover submit` need of a scheduler."""

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, sorted by name."""
        ...

    def start(
        self,
        node: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        job: str,
        log: pathlib.Path,
    ) -> str:
        """Run `argv` on `node` as a job step of `job`, output to `log`; return the step's id."""
        ...

    def drain(self, node: str, reason: str) -> None:
        """Take no new work to `node`; what runs there goes on."""
        ...

    def resume(self, node: str) -> None:
        """Undo `drain`, and take a node that was down back into service."""
        ...

    def end(self, node: str, reason: str) -> None:
        """Fence `node`: kill everything that a job runs there, at once. Returns when it is gone."""
        ...

    def reassign(self, node: str, job: str, to: str) -> None:
        """Let a node of `job`, and what runs there, belong to the job `to`."""
        ...

    def order(self, job: str, exclude: Collection[str]) -> str | None:
        """Start another standby of `job`, not on a node in `exclude`; None if no node is free."""
        ...


class Outcome(NamedTuple):
    """What came of asking the scheduler for something."""

    is_done: bool
    """Whether it need not be asked again."""
    text: str = ""
    """Why it was not done, "" if it only takes time; or what people should know of it."""

    @classmethod
    def done(cls, text: str = "") -> Outcome:
        """Return that it is done."""
        return cls(is_done=True, text=text)

    @classmethod
    def not_yet(cls, why: str = "") -> Outcome:
        """Return that it is to be asked again."""
        return cls(is_done=False, text=why)


class Fate(str, enum.Enum):
    """What the scheduler says of a job's main allocation."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    """Its own commands, or its nodes, have ended: ranks on other allocations may go on."""
    STOPPED = "stopped"
    """Somebody, or a limit, has ended it: nothing of it is to go on."""
    REQUEUED = "requeued"
    """It starts anew, as another job for us."""
    MISSING = "missing"
    """The scheduler answers and does not know it: that does not mean that it has ended."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler holds for a job."""

    job: str
    fate: Fate
    text: str
    """The main allocation, in a few words for people."""
    standbys: tuple[str, ...] = ()
    """The others, in a few words each."""
    standby_nodes: tuple[str, ...] = ()
    """Those that the others hold."""
    at: float = 0.0
    """When the scheduler said so, by its poller's clock: the same for all that one poll told."""


class Allocations(Protocol):
    """Jobs whose nodes the scheduler has allocated: asked for by name, given back, ended."""

    def adopt(self, job: str, owner: str, spec: wire.SlurmSpec) -> None:
        """Keep what is needed to ask for standbys of `job`. Raises `SchedulerError`."""
        ...

    def belongs(self, spec: wire.SlurmSpec, owner: str) -> bool:
        """Return whether the scheduler says so. May take seconds. Raises `SchedulerError`."""
        ...

    def succeed(self, job: str) -> str:
        """Adopt the next incarnation of a requeued job; return its name. May take seconds."""
        ...

    def forsake(self, job: str) -> None:
        """Cancel the main allocation that was requeued, of a job that needs it no more.

        May take seconds. Raises `SchedulerError`.
        """
        ...

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, as of the last poll. Raises `SchedulerError` if that is not known."""
        ...

    def look(self, jobs: Collection[str]) -> list[Allocation]:
        """Return what is held for the jobs, as of the last poll. Raises `SchedulerError`.

        A job of which that cannot be told is left out, so that it does not hide the others.
        """
        ...

    def nudge(self) -> None:
        """Poll soon: something has happened."""
        ...

    def load(self) -> str:
        """Return how much the scheduler is asked, in a few words."""
        ...

    def carry_out(self, errand: Errand) -> Outcome:
        """Do what `decide` asks for. Idempotent; may take seconds. Raises `SchedulerError`."""
        ...
