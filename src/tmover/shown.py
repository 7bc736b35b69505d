"""What is shown of a job: the structs of `tmover status`, on the wire and as JSON.

New fields have defaults, and fields are never retyped: programs read them.
"""

from __future__ import annotations

import msgspec

from tmover.core.incident import Incident
from tmover.core.straggler import OwnStatus
from tmover.core.warmth import Warmth


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One place in a job."""

    slot: int
    node: str
    """"" while nobody holds the slot."""
    agent: str
    state: str
    step: int | None
    heard_s: float | None
    """Seconds since its agent was heard of; None if it never was by this controller."""


class StandbyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node that could take a place."""

    node: str
    agent: str
    state: str
    heard_s: float | None = None
    slot: int = 0
    """The one it rehearses, or has rehearsed last."""
    takes: tuple[int, ...] = ()
    """The slots it could take as it is."""
    rehearsed: tuple[int, ...] = ()
    """The slots whose roles it has rehearsed: these it can take after another rehearsal."""
    rebuilds: str = ""
    """Why it must rehearse a slot before it takes it, "" if it need not or that is not known."""
    warmth: Warmth | None = None
    """What of it is warm, and how long its last shadow step took; None unless it is."""
    warm_s: float | None = None
    """Seconds since it has said so."""
    recorded: str = ""
    """What its rehearsal was answered from; "" before it is over."""


class MoveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The move under way."""

    phase: str
    leaver: str
    joiner: str
    """"" while none is found."""
    epoch: int


class WaitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How long other ranks wait for one."""

    rank: int
    node: str
    per_step_s: float
    """Without the time in which it waits for others itself."""
    steps: int
    """In how many of the last steps this was measured."""
    is_straggler: bool = False
    """Whether it is the one that others wait for most, and for a notable part of their step."""


class WaitingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a job waits for that stands still: a node for slots that nobody can take."""

    since: float
    """The controller's wall clock when it began."""
    slots: tuple[int, ...]
    tried: tuple[str, ...]
    """Who may take them, or why not, one by one."""
    until: float | None
    """When the wait ends, None if it does not."""
    then: str
    """What happens at that time."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job as a person wants to see it."""

    job: str
    owner: str
    phase: str
    epoch: int
    step: int | None
    world_size: int
    slots: tuple[SlotStatus, ...]
    standbys: tuple[StandbyStatus, ...]
    move: MoveStatus | None
    notes: tuple[str, ...]
    """The last decisions and why, oldest first."""
    outcome: str
    """How it ended, "" before."""
    code: int | None = None
    """The exit code it ended with, None before."""
    allocations: tuple[str, ...] = ()
    """What the scheduler holds for it, the main allocation first, in a few words each."""
    waits: tuple[WaitStatus, ...] = ()
    """The ranks that others wait for, the worst one first."""
    own: tuple[OwnStatus, ...] = ()
    """How long each node's own part of a step takes, by slot; empty where it is not known."""
    slow: str = ""
    """Which node is slower than its peers, "" if none is."""
    suspect: str = ""
    """How long it has made no step, and who is to blame, if that is longer than usual."""
    redundancy: str = ""
    """Where a lost rank's state comes from: "replicas" or "copies"; "" before that is known."""
    copies: int = 0
    """On how many other nodes copies of each rank are kept, 0 if none are needed."""
    placing: str = ""
    """How a joiner's loader goes to its position: by batch "number", its own "state", a "replay"
    of all before; "" before that is known."""
    waiting: WaitingStatus | None = None
    """None unless it stands still for want of a node."""
    incidents: tuple[Incident, ...] = ()
    """The newest moves and failures, oldest first: what happened in them, and when."""

    pool: str = ""
    """The jobs of one owner that name the same pool lend each other standbys; "" is none."""
    pool_jobs: tuple[str, ...] = ()
    """Those that share with this one now."""
    as_of: float | None = None
    """None if a controller said it; else when one was heard of last: it is what the journal says.
    """

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes on which it has ranks or standbys, by slot, standbys last."""
        slots = [slot.node for slot in self.slots if slot.node]
        return tuple(dict.fromkeys([*slots, *(standby.node for standby in self.standbys)]))
