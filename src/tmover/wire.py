"""Messages between controller, agents, workers and command line: MessagePack, nothing pickled.

The first frame of every message is `VERSION`, so that two releases that do not understand each
other fail with a sentence instead of a decoding error. The second is one tagged, frozen struct: an
event or an order as `core` defines it, or one of the envelopes below, which no decision
depends on.

Each direction has its own union and its own decoder, so that nobody can say what is not theirs to
say. New fields have defaults, fields are never retyped, tags are never reused.

    agent, command line -> controller   ToController     decode_event
    controller -> agent, command line   FromController   decode_order
    stranger -> the controller's door   Introduction     decode_introduction
    door -> stranger                    FromDoor         decode_at_door
    worker -> agent (ipc)               FromWorker       decode_worker
    agent -> worker (ipc)               FromController   decode_order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, Union

import msgspec

from tmover.core.events import FromAgent, Record
from tmover.core.orders import AnyOrder
from tmover.core.progress import Progress
from tmover.errors import ProtocolError
from tmover.shown import JobStatus as JobStatus
from tmover.shown import MoveStatus as MoveStatus
from tmover.shown import SlotStatus as SlotStatus
from tmover.shown import StandbyStatus as StandbyStatus
from tmover.shown import WaitingStatus as WaitingStatus
from tmover.shown import WaitStatus as WaitStatus

VERSION = b"tmover/1"

T = TypeVar("T")


# --- envelopes between agent and controller -------------------------------------------------------


class Heartbeat(Record, frozen=True, kw_only=True):
    """The agent lives; `steps` is the last step of each of its workers, by local rank."""

    agent: str
    boot: str = ""
    """The controller it believes it speaks to, "" before the first `Greeting`."""
    steps: tuple[int, ...] = ()
    phase: str = ""
    """What its workers are doing, for people."""
    progress: tuple[Progress | None, ...] = ()
    """What its workers have said last of how they get on, by local rank; None of one that has not.
    """


ERROR_PHASE = "error: "
"""How a worker's last `Pulse` begins if its script has failed; then comes why."""
CARRIED_PHASE = "interrupted: "
"""How it begins if the script ended because another rank was lost."""


class Heard(Record, frozen=True, kw_only=True):
    """Answers a heartbeat: the controller `boot` lives and knows this agent."""

    agent: str
    boot: str


class WhoAreYou(Record, frozen=True, kw_only=True):
    """The controller `boot` does not know this agent, or lost its connection for a while.

    The agent answers with `Joined` and the latest event of each kind of each of its workers.
    """

    agent: str
    boot: str


class Program(Record, frozen=True, kw_only=True):
    """What a job's nodes run, as an agent of it says: for standbys that other jobs lend to it."""

    agent: str
    script: str
    """A path, or a module's name if `module`."""
    arguments: tuple[str, ...] = ()
    module: bool = False
    flags: tuple[str, ...] = ()
    """Torchrun's."""
    cwd: str
    env: dict[str, str] = msgspec.field(default_factory=dict)
    """Without what is a node's own. It may hold secrets: it is never journaled."""

    def __repr__(self) -> str:
        """Return what may stand in a log."""
        return f"Program(job={self.job!r}, agent={self.agent!r}, script={self.script!r})"


class Greeting(Record, frozen=True, kw_only=True):
    """Goes before the first order to an agent that has joined: the job's secret, for its links."""

    agent: str
    boot: str
    secret: bytes
    pool: str = ""
    """The pool of the job; if there is one, its members answer with their `Program`."""
    program: Program | None = None
    """What the job runs, for a standby that another job has lent; None while that is not known."""

    def __repr__(self) -> str:
        """Return the greeting without its secret, fit for a log."""
        return f"Greeting(job={self.job!r}, agent={self.agent!r}, boot={self.boot!r}, secret=...)"


# --- envelopes between worker and agent -----------------------------------------------------------


class Hello(Record, frozen=True, kw_only=True):
    """A worker's first word to its agent; it does not know its job yet."""

    local_rank: int
    pid: int
    job: str = ""


class Endpoint(Record, frozen=True, kw_only=True):
    """The worker listens here; the agent gathers these into `Launched`."""

    local_rank: int
    endpoint: str
    job: str = ""


class Siblings(Record, frozen=True, kw_only=True):
    """All workers of the node listen; these are their endpoints, by local rank."""

    endpoints: tuple[str, ...]


class Pulse(Record, frozen=True, kw_only=True):
    """The last step the worker applied, for the agent's next heartbeat."""

    local_rank: int
    step: int
    phase: str = ""
    job: str = ""
    code: int = 1
    """The exit code of a script that has failed."""


class Pace(Record, frozen=True, kw_only=True):
    """How a worker gets on, said from time to time whatever its main thread does."""

    local_rank: int
    progress: Progress
    job: str = ""


# --- requests of the command line -----------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a person may ask. `job` None means the only job there is that has not ended."""


class StatusRequest(Request, frozen=True, kw_only=True):
    """How is the job? None asks for all of them."""

    job: str | None = None
    ended: int | None = None
    """Of the jobs that have ended, only so many, the last ones; None for all of them."""


class MoveRequest(Request, frozen=True, kw_only=True):
    """Move the ranks of `node` to a standby."""

    node: str
    reason: str
    job: str | None = None
    more: tuple[str, ...] = ()
    """Nodes to be left in the same move, as far as there are standbys for them, in this order."""


class ReadyRequest(Request, frozen=True, kw_only=True):
    """The node may be used again: it was repaired, or its drain was undone."""

    node: str
    job: str | None = None


class SlurmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A job of Slurm: what it is, and how its standbys are submitted."""

    id: int
    """Slurm's job id."""
    name: str
    """Slurm's job name; a standby's is the same with `-standby` after it."""
    headless: bool = False
    """Its nodes are held by `salloc --no-shell`; no batch script runs."""
    options: tuple[str, ...] = ()
    """The sbatch options of a standby, without those that tmover sets itself."""
    script: str
    """The text of the batch script."""
    arguments: tuple[str, ...] = ()
    """What the script is called with."""
    cwd: str
    env: dict[str, str] = {}
    """What the script's jobs are submitted with. It may hold secrets: it is never journaled."""

    def __repr__(self) -> str:
        """Return what may stand in a log."""
        return f"SlurmSpec(id={self.id}, name={self.name!r}, headless={self.headless})"


class SubmitRequest(Request, frozen=True, kw_only=True):
    """Look after a new job. Answered by `Accepted` with its id.

    With `slurm`, the job is known by Slurm's id, and asking twice changes nothing.
    """

    nnodes: int
    nproc: int
    """Ranks per node; 0 if the agents tell."""
    owner: str
    standby: int = 0
    """How many standbys are kept; one that is used up is ordered anew."""
    slurm: SlurmSpec | None = None
    pool: str = ""
    """Jobs of one owner that name the same pool lend each other standbys."""


class CancelRequest(Request, frozen=True, kw_only=True):
    """End the job now."""

    reason: str
    job: str | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the answers to requests."""


class StatusReply(Reply, frozen=True, kw_only=True):
    """The jobs asked for."""

    jobs: tuple[JobStatus, ...]
    more: int = 0
    """How many have ended besides, and were not asked for."""
    scheduler: str = ""
    """How the scheduler answers, in a few words; "" if none is asked."""


class Accepted(Reply, frozen=True, kw_only=True):
    """The request is journaled and will be acted on."""

    text: str
    job: str


class RefusedReply(Reply, frozen=True, kw_only=True):
    """The request was not accepted, and why. Also the answer to an agent of a job unknown here."""

    text: str
    is_unknown: bool = False
    """Whether the job is unknown here: it may only be that nobody has told of it yet."""


class Introduction(Request, frozen=True, kw_only=True):
    """Let in the key of this connection: the credential says whose it is. For the door alone."""

    credential: str
    """MUNGE's, with what `controller.introduction.payload` returns in it."""

    def __repr__(self) -> str:
        """Return what may stand in a log."""
        return "Introduction(...)"


class Introduced(Reply, frozen=True, kw_only=True):
    """The key is known now, as that of `user`."""

    user: str


AnyRequest = Union[StatusRequest, MoveRequest, ReadyRequest, SubmitRequest, CancelRequest]
AnyReply = Union[StatusReply, Accepted, RefusedReply]
FromNode = Union[FromAgent, Program]
ToController = Union[FromNode, Heartbeat, AnyRequest]
FromController = Union[AnyOrder, Greeting, Heard, WhoAreYou, Siblings, AnyReply]
FromDoor = Union[Introduced, RefusedReply]
FromWorker = Union[FromAgent, Hello, Endpoint, Pulse, Pace]
Message = Union[ToController, FromController, FromWorker, Introduction, FromDoor]

_encode = msgspec.msgpack.Encoder().encode
_to_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)
_from_controller: msgspec.msgpack.Decoder[FromController] = msgspec.msgpack.Decoder(FromController)
_to_door: msgspec.msgpack.Decoder[Introduction] = msgspec.msgpack.Decoder(Introduction)
_from_door: msgspec.msgpack.Decoder[FromDoor] = msgspec.msgpack.Decoder(FromDoor)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: Message) -> list[bytes]:
    """Return the frames of `message`, ready for `send_multipart`."""
    return [VERSION, _encode(message)]


def decode_event(frames: Sequence[bytes]) -> ToController:
    """Read what an agent or the command line sent. Raises `ProtocolError`."""
    return _decode(_to_controller, frames)


def decode_order(frames: Sequence[bytes]) -> FromController:
    """Read what the controller sent, or an agent to its worker. Raises `ProtocolError`."""
    return _decode(_from_controller, frames)


def decode_introduction(frames: Sequence[bytes]) -> Introduction:
    """Read what somebody said at the door. Raises `ProtocolError`."""
    return _decode(_to_door, frames)


def decode_at_door(frames: Sequence[bytes]) -> FromDoor:
    """Read what was answered at the door. Raises `ProtocolError`."""
    return _decode(_from_door, frames)


def decode_worker(frames: Sequence[bytes]) -> FromWorker:
    """Read what a worker sent to its agent. Raises `ProtocolError`."""
    return _decode(_from_worker, frames)


def agent_of(worker: str) -> str:
    """Return the agent of a worker.

    >>> agent_of("node1-0a1b2c3d/0")
    'node1-0a1b2c3d'
    """
    return worker.rpartition("/")[0]


def _decode(decoder: msgspec.msgpack.Decoder[T], frames: Sequence[bytes]) -> T:
    if not frames:
        msg = "an empty message"
        raise ProtocolError(msg)
    if frames[0] != VERSION:
        msg = f"the peer speaks {bytes(frames[0][:40])!r}, this is {VERSION!r}"
        raise ProtocolError(msg)
    if len(frames) != 2:
        msg = f"a message of {len(frames)} frames, not 2"
        raise ProtocolError(msg)
    try:
        return decoder.decode(frames[1])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        msg = f"unreadable message: {error}"
        raise ProtocolError(msg) from error
