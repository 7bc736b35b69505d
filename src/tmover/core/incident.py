"""A record of one move or failure: what happened, when, and who took which slot how."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Mark(NamedTuple):
    """Something that happened in an incident, and when."""

    name: str
    at: float


class Lost(NamedTuple):
    """A node whose workers or agent were lost, and why."""

    node: str
    reason: str


class Handing(NamedTuple):
    """A slot that changed hands, or was started again."""

    slot: int
    before: str
    """The node that held it."""
    after: str
    path: str
    """"standby", "same node", or, if it came meanwhile, "lent" by another job or "new node"."""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One planned move, or one failure with all that came of it before all trained again."""

    number: int
    """Counted from 1 in each job."""
    kind: str
    """"move" or "failure"."""
    began: float
    """When it was heard of."""
    cause: str
    """What was heard first, in words."""
    epoch: int
    """The world that was disturbed."""
    marks: tuple[Mark, ...] = ()
    """In the order in which they were heard."""
    witnesses: tuple[str, ...] = ()
    """Workers that saw a link break."""
    lost: tuple[Lost, ...] = ()
    handings: tuple[Handing, ...] = ()
    connect_s: float = 0.0
    """The longest that a joiner took to open its links."""
    receive_s: float = 0.0
    """The longest that a joiner took to receive the state."""
    into: int = 0
    """The world that all trained in afterwards, 0 as long as there is none."""
    outcome: str = ""
    """"moved", "recovered", "called off", "started afresh", or how the job ended; "" before."""
    holders: tuple[tuple[str, str, int], ...] = ()
    """Who held each slot when it began: agent, node, and launch."""
    idle: tuple[str, ...] = ()
    """The agents that had no place then."""
