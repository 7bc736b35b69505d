"""What can happen to a job: events. What the controller can have done about it is in `orders`.

One definition serves as wire message, journal record and test literal: every value is frozen,
tagged and encodable.

Three names recur. An *agent* is one `tmover run`, named by its node and a random part, so that a
node that comes back is another agent. A *worker* is one rank's process, `agent/local_rank`. A
*step* is the index of a training step; a rank's is the last one it applied, -1 before the first.
"""

from __future__ import annotations

import enum
from typing import Union

import msgspec

from tmover.core.warmth import Warmth

NO_STEP = -1
"""The step of a rank that has applied none."""
CARRIED_ALONG = 75
"""Exit code of workers whose script ended because another rank was lost (`EX_TEMPFAIL`)."""
REQUEUE = 75
"""The exit code of a job that no node came for: the same might go well later (`EX_TEMPFAIL`)."""
SETTLED = 1
"""The first step after which a world can change hands, counted from the run's first.

DDP lays its buckets anew in its second forward, on the ranks of the job as on the standby that has
rehearsed. Between that of the one and that of the others they would exchange different things.
"""
CANCELLED = 130
"""The exit code of a job that somebody ended."""


class Wait(str, enum.Enum):
    """What a deadline is the deadline of. The values are the configuration's keys, less `_s`."""

    FORM = "form"
    ACCUSE = "accuse"
    REPORT = "report"
    PREPARE = "prepare"
    SWITCH = "switch"
    STANDBY = "standby"
    NODE = "node"
    STORE = "store"


class Placing(str, enum.Enum):
    """How a joiner's loader goes to where the lost rank's stood; "" is not known."""

    UNKNOWN = ""
    NUMBER = "number"
    """Straight to the batch: its samples have numbers."""
    STATE = "state"
    """By the state that the dataset or the loader has of its own."""
    REPLAY = "replay"
    """Everything before it is fetched again and dropped."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a world: which process holds it, and where that process listens."""

    rank: int
    worker: str
    node: str
    endpoint: str
    """`address:port` of the worker's listener."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A world: who holds which rank in `epoch`."""

    epoch: int
    members: tuple[Member, ...]
    """In rank order."""

    def member(self, rank: int) -> Member:
        """Return the member that holds `rank`."""
        return self.members[rank]

    def rank_of(self, worker: str) -> int | None:
        """Return the rank that `worker` holds here, or None if it holds none."""
        return next((m.rank for m in self.members if m.worker == worker), None)


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything that is sent or journaled."""

    job: str


# --- events: what agents and workers say ----------------------------------------------------------


class Event(Record, frozen=True, kw_only=True):
    """A fact. `at` is the controller's wall clock in seconds when it heard of it."""

    at: float = 0.0


class Joined(Event, frozen=True, kw_only=True):
    """An agent is up on `node`. Sent again to a controller that does not know it yet."""

    agent: str
    node: str
    address: str
    nproc: int
    standby: bool
    slot: int | None = None
    """The slot its scheduler's position suggests; counts only before the first world is formed."""
    lent_by: str = ""
    """The job whose standby it was."""


class Launched(Event, frozen=True, kw_only=True):
    """All workers of the agent's launch number `launch` are up and listening, by local rank."""

    agent: str
    launch: int
    endpoints: tuple[str, ...]


class Looping(Event, frozen=True, kw_only=True):
    """A worker of the job has entered its loop; `schema` digests what it tracks, by name."""

    worker: str
    launch: int
    schema: dict[str, str]
    placing: Placing = Placing.UNKNOWN
    step: int = NO_STEP  # the last one in the checkpoint it goes on from


class Sharing(Event, frozen=True, kw_only=True):
    """The first vote has shown which ranks hold the same: who keeps whose records from now on."""

    worker: str
    launch: int
    keepers: tuple[int, ...]
    """By rank; empty if a rank has no replica on another node."""
    copies: int = 1
    """On how many other nodes copies of each rank are kept then."""


class Warm(Event, frozen=True, kw_only=True):
    """A standby's worker has rehearsed and waits to be promoted."""

    worker: str
    launch: int
    schema: dict[str, str]
    cast: int = 0
    """How often it was told to run the script again before it rehearsed."""
    proof: str | None = None
    """What has come of the proof that it can become another rank in place: "" if it can, else why
    not; None if there was none."""
    recorded: str = ""
    """What its rehearsal was answered from, for people."""
    warmth: Warmth | None = None


class Prepared(Event, frozen=True, kw_only=True):
    """The worker's links of `epoch` are open and parked."""

    worker: str
    epoch: int


class PrepareFailed(Event, frozen=True, kw_only=True):
    """The worker cannot prepare `epoch`."""

    worker: str
    epoch: int
    reason: str


class Entered(Event, frozen=True, kw_only=True):
    """The worker stands at the boundary after `step` and switches to `epoch`."""

    worker: str
    epoch: int
    step: int


class Verified(Event, frozen=True, kw_only=True):
    """The joiner holds the state of `step`, every chunk of it verified."""

    worker: str
    epoch: int
    step: int
    connect_s: float = 0.0
    """How long it took to open its links, in seconds."""
    receive_s: float = 0.0
    """How long it took from there until the state was here and verified, in seconds."""


class Passed(Event, frozen=True, kw_only=True):
    """The worker has passed the commit barrier of `epoch` and trains on."""

    worker: str
    epoch: int
    step: int


class Stepped(Event, frozen=True, kw_only=True):
    """Rank 0's worker has applied the first step of `epoch`, and so have all."""

    worker: str
    epoch: int
    step: int


class Stored(Event, frozen=True, kw_only=True):
    """What the worker was told to store in `epoch` is on disk, or cannot be.

    Whoever stores the part of rank 0 says so when the checkpoint is whole.
    """

    worker: str
    epoch: int
    step: int
    reason: str = ""
    """Why there is no checkpoint of it, "" if there is."""


class Broken(Event, frozen=True, kw_only=True):
    """The worker saw its links to `peers` break in `epoch`. An accusation, no verdict."""

    worker: str
    epoch: int
    peers: tuple[str, ...]
    """Workers at the other end."""
    reason: str


class Reported(Event, frozen=True, kw_only=True):
    """Where a worker stands after `of` was revoked: nothing of `of` can pass there any more.

    It answers every `Revoke`, each time, whether or not the worker had a part in that epoch.
    """

    worker: str
    of: int
    """The epoch whose revocation it answers."""
    epoch: int
    """The epoch it trains in. Equal to `of` if it had passed that epoch's barrier."""
    step: int | None
    """The last step it applied; None if it holds no usable state (a joiner before `Verified`)."""
    doubt: int | None
    """The step it voted good on without learning the outcome."""
    own: tuple[int, ...] = ()
    """The steps after which what it holds was copied, and is still there."""
    kept: dict[int, tuple[int, ...]] = {}
    """Those of which it keeps copies for other ranks, by rank."""


class Finished(Event, frozen=True, kw_only=True):
    """The worker's script has ended well; it waits, still able to help, until all have."""

    worker: str
    step: int


class Exited(Event, frozen=True, kw_only=True):
    """The workers of the agent's launch number `launch` are gone; the agent still answers."""

    agent: str
    launch: int
    code: int
    reason: str


class Left(Event, frozen=True, kw_only=True):
    """The agent ends, for somebody told it to, and so have its workers: neither comes back."""

    agent: str
    code: int
    """How its workers ended."""
    reason: str


class Answered(Event, frozen=True, kw_only=True):
    """The agent is alive, and so are its workers."""

    agent: str
    probe: int


# --- events: what people, the scheduler and clocks say --------------------------------------------


class Submitted(Event, frozen=True, kw_only=True):
    """A job of `nnodes` x `nproc` ranks is to be looked after."""

    nnodes: int
    nproc: int
    """0 if the first agent tells."""
    owner: str
    standby: int = 0
    """How many standbys are kept: one that is used up or lost is ordered anew."""
    allocated: bool = False
    """The scheduler has the nodes in allocations, which may start late and must be ended."""
    pool: str = ""
    """Jobs of one owner that name the same pool lend each other standbys."""


class MoveRequested(Event, frozen=True, kw_only=True):
    """The node's ranks are to be moved to a standby, though it still works."""

    node: str
    reason: str
    more: tuple[str, ...] = ()
    """Nodes to be left with it, in this order if there are too few standbys."""


class NodeReady(Event, frozen=True, kw_only=True):
    """The node may be used again: it was repaired, or its drain was undone."""

    node: str


class CancelRequested(Event, frozen=True, kw_only=True):
    """The job is to end now."""

    reason: str
    code: int = CANCELLED


class NodeLost(Event, frozen=True, kw_only=True):
    """The scheduler says that the node is down."""

    node: str
    reason: str


class Lent(Event, frozen=True, kw_only=True):
    """A standby is to be of the job `to` from now on, which has none, if it is still idle."""

    agent: str
    to: str


class StandbysGone(Event, frozen=True, kw_only=True):
    """The scheduler holds none of the standbys any more that were ordered with `epoch`."""

    epoch: int


class LeaseExpired(Event, frozen=True, kw_only=True):
    """Nothing was heard of the agent for the length of its lease."""

    agent: str


class Stuck(Event, frozen=True, kw_only=True):
    """All ranks of `epoch` have waited for too long for those of one agent."""

    agent: str
    epoch: int
    reason: str


class Straggling(Event, frozen=True, kw_only=True):
    """The agent's node has been slower than its peers in `epoch` for long."""

    agent: str
    epoch: int
    reason: str
    act: bool = False
    """Whether it is to be moved, if it can be."""
    hindrance: str = ""
    """Why it is not, where it would be."""


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """A timer set by `ArmDeadline` has fired."""

    wait: Wait
    epoch: int


AnyEvent = Union[
    Joined, Launched, Looping, Sharing, Warm, Prepared, PrepareFailed, Entered, Verified, Passed,
    Stepped, Stored, Broken, Reported, Finished, Exited, Left, Answered, Submitted, MoveRequested,
    NodeReady, CancelRequested, NodeLost, Lent, StandbysGone, LeaseExpired, Stuck, Straggling,
    DeadlinePassed,
]  # fmt: skip
Outside = (
    Submitted | MoveRequested | NodeReady | CancelRequested | NodeLost | Lent | StandbysGone
    | LeaseExpired | Stuck | Straggling
)  # fmt: skip
"""What people, the scheduler and suspicion say."""
OfMoves = Union[
    Prepared, PrepareFailed, Entered, Verified, Passed, Stepped, Broken, Reported, Finished,
    Answered,
]  # fmt: skip
"""What workers and agents say of moves and failures."""
FromAgent = Union[
    Joined, Launched, Looping, Sharing, Warm, Prepared, PrepareFailed, Entered, Verified, Passed,
    Stepped, Stored, Broken, Reported, Finished, Exited, Left, Answered,
]  # fmt: skip
