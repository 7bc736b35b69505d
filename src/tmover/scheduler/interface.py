"""What tmover asks of a scheduler, in Slurm's words.

Every call is idempotent or says why not, may take seconds, and raises `SchedulerError` with what to
do. A node that the scheduler does not know is an error; a job it does not know is none: missing is
not finished.
"""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec


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

    def order(self, job: str, exclude: Collection[str]) -> str | None:
        """Start another standby of `job`, not on a node in `exclude`; None if no node is free."""
        ...
