"""What a simulated rank is made of: a mailbox where the real one has sockets, numbers for tensors.

A step's gradient is a hash of the model and of every rank's private records, so that an update
that is applied twice, left out, or made from stale gradients or another rank's records shows in the
model for ever.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from support.links import Links
from tmover.core.events import NO_STEP
from tmover.core.rank import Rank

if TYPE_CHECKING:
    from tmover.core.events import FromAgent, Plan
    from tmover.core.orders import Assign, Prepare

SCHEMA = {"model": "m"}
NOTHING = 0


def mixed(*parts: int) -> int:
    """Return a number that depends on all parts and their order."""
    value = 0x345678
    for part in parts:
        value = (value ^ part) * 0x9E3779B1 % (1 << 61)
        value ^= value >> 29
    return value + 1


class Stage(enum.Enum):
    """What the main thread of the rank's script is doing."""

    LAUNCHED = "up, and told nothing yet"
    BUILDING = "in its first world, before the loop"
    IDLE = "between two steps"
    REDUCING = "exchanging gradients"
    KEEPING = "waiting for the records it keeps"
    VOTING = "waiting for votes"
    COUNTING = "has heard every vote, and not looked yet"
    LEFT = "has handed its state over"
    HELD = "waiting for a decision"
    RECEIVING = "waiting for state"
    CROSSING = "waiting for the records it keeps, before a barrier"
    BARRIER = "waiting for barrier messages"
    PASSING = "has heard every barrier message, and not looked yet"
    FINISHED = "at the end of the script"
    STANDBY = "warm, or rehearsing"
    DEAD = "gone"


class Kind(enum.Enum):
    """What a frame between two ranks carries."""

    DATA = "data"
    RECORD = "record"
    VOTE = "vote"
    BARRIER = "barrier"
    REVOKE = "revoke"
    HALF_STATE = "the first half of a state"
    STATE = "the rest of a state"
    END = "the process at the other end is gone"
    CUT = "the link broke, both ends live"


class Frame(NamedTuple):
    """Something on a link."""

    kind: Kind
    epoch: int = 0
    step: int = 0
    body: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of a step."""

    step: int
    record: int
    """This rank's records after the step."""
    gradient: int = NOTHING


class Outside(Protocol):
    """What a process needs of the world around it."""

    def send(self, worker: Process, peer: str, frame: Frame) -> None: ...
    def tell(self, worker: Process, event: FromAgent) -> None: ...
    def work(self, worker: Process) -> None: ...
    def is_up(self, endpoint: str) -> bool: ...
    def applied(self, worker: Process, step: int) -> None: ...
    def stored(self, worker: Process, step: int, *, rank: int, record: int) -> None: ...
    def committed(self, worker: Process, step: int, *, saves: bool) -> None: ...


class Process:
    """One worker process: its standing, its model, its mail."""

    def __init__(
        self, uid: str, launch: int, outside: Outside, *, total: int, nproc: int, sandbox: bool
    ) -> None:
        self.uid, self.launch, self.out = uid, launch, outside
        self.casts = 0
        self.proof: str | None = None
        self.total, self.nproc = total, nproc
        self.stage = Stage.STANDBY if sandbox else Stage.LAUNCHED
        self.rank = Rank(step=None) if sandbox else Rank()
        self.world: Plan | None = None
        self.prepare: Prepare | None = None
        self.order: Assign | None = None
        """The assignment that is being carried out, or the last one."""
        self.target: Plan | None = None
        """The world this rank is crossing into, or has handed over to."""
        self.model = NOTHING if sandbox else mixed(NOTHING)
        self.record = NOTHING
        self.kept: dict[int, int] = {}
        """The records of this rank's ward, by step."""
        self.attempt: Attempt | None = None
        self.mail: dict[tuple[Kind, int], dict[str, list[Frame]]] = {}
        self.links = Links(self.endpoint)
        self.broken: set[str] = set()
        """Endpoints of peers whose link is known to be broken."""
        self.accused: set[int] = set()
        self.passed_on: set[int] = set()
        self.will_refuse = False
        self.done = NO_STEP
        """The last step this process applied, or received."""

    def __repr__(self) -> str:
        return f"{self.uid}#{self.launch} {self.stage.name} {self.rank}"

    @property
    def endpoint(self) -> str:
        return f"{self.uid}:{self.launch}"

    @property
    def here(self) -> Plan:
        """Return the world this rank trains in."""
        assert self.world is not None, self
        return self.world

    @property
    def there(self) -> Plan:
        """Return the world this rank is crossing into."""
        assert self.target is not None, self
        return self.target

    @property
    def step(self) -> int:
        """Return the last step this rank has applied."""
        assert self.rank.step is not None, self
        return self.rank.step

    @property
    def tried(self) -> Attempt:
        """Return the attempt under way."""
        assert self.attempt is not None, self
        return self.attempt

    def number(self, plan: Plan) -> int:
        found = plan.rank_of(self.uid)
        assert found is not None, (self, plan)
        return found

    def beside(self, plan: Plan, slots: int) -> str | None:
        """Return the worker some slots on with the same local rank, None on the only node."""
        size = len(plan.members)
        if size == self.nproc:
            return None
        return plan.member((self.number(plan) + slots * self.nproc) % size).worker

    def keeper(self, plan: Plan) -> str | None:
        return self.beside(plan, 1)

    def ward(self, plan: Plan) -> str | None:
        return self.beside(plan, -1)

    def others(self, plan: Plan) -> list[str]:
        return [m.worker for m in plan.members if m.worker != self.uid]

    def unreachable(self, plan: Plan) -> list[str]:
        """Return the members of `plan` to which no link can be opened."""
        return [m.worker for m in plan.members if not self.out.is_up(m.endpoint)]

    def post(self, plan: Plan, frame: Frame) -> None:
        for peer in self.others(plan):
            self.out.send(self, peer, frame)

    def put(self, peer: str, frame: Frame) -> None:
        box = self.mail.setdefault((frame.kind, frame.epoch), {})
        box.setdefault(peer, []).append(frame)

    def have(self, kind: Kind, epoch: int, peers: Iterable[str]) -> bool:
        box = self.mail.get((kind, epoch), {})
        return all(box.get(peer) for peer in peers)

    def take(self, kind: Kind, epoch: int, peer: str) -> Frame:
        return self.mail[kind, epoch][peer].pop(0)
