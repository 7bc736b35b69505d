"""The agent's line to the workers of one launch: a ZeroMQ ROUTER on an abstract Unix socket.

Abstract, because then there is no file that a killed agent could leave behind; only processes of
the same user are let in. Each launch has an address of its own, so that nothing a worker of an
earlier launch has sent is taken for a later one's.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator

import zmq

from tmover import wire
from tmover.core.events import NO_STEP, FromAgent
from tmover.core.orders import AnyOrder, Stop, Welcome
from tmover.core.progress import Progress
from tmover.errors import ProtocolError

logger = logging.getLogger(__name__)


def new_address() -> str:
    """Return an address nobody uses. Workers may be told it before anybody listens there."""
    return f"ipc://@tmover-{os.getpid()}-{secrets.token_hex(8)}"


class Intercom:
    """Knows which worker is behind which connection, and what each has said of itself."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, agent: str, nproc: int
    ) -> None:
        self._agent = agent
        self._nproc = nproc
        self._ranks: dict[bytes, int] = {}
        self._pending: list[AnyOrder] = []
        self._introduction: tuple[wire.Greeting, Welcome] | None = None
        self._endpoints: dict[int, str] = {}
        self.pulses: dict[int, wire.Pulse] = {}
        """The last word of each worker on its progress, by local rank."""
        self._paces: dict[int, Progress] = {}
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        self.socket.linger = 0
        self.socket.bind(address)

    @property
    def endpoints(self) -> tuple[str, ...] | None:
        """Where the workers listen, by local rank, or None before all do."""
        if len(self._endpoints) < self._nproc:
            return None
        return tuple(self._endpoints[rank] for rank in range(self._nproc))

    @property
    def steps(self) -> tuple[int, ...]:
        """The last step of each worker, by local rank."""
        pulses = (self.pulses.get(rank) for rank in range(self._nproc))
        return tuple(NO_STEP if pulse is None else pulse.step for pulse in pulses)

    @property
    def progress(self) -> tuple[Progress | None, ...]:
        """How each worker gets on, by local rank, as far as it has said so."""
        return tuple(self._paces.get(rank) for rank in range(self._nproc))

    @property
    def phase(self) -> str:
        """What the workers say they do: that of the one that is behind."""
        pulses = [self.pulses[rank] for rank in sorted(self.pulses)]
        return min(pulses, key=lambda pulse: pulse.step).phase if pulses else "starting"

    def introduce(self, greeting: wire.Greeting, welcome: Welcome) -> None:
        """Tell the workers who they are, those that say hello later too."""
        self._introduction = (greeting, welcome)
        for identity in self._ranks:
            self._send(identity, greeting)
            self._send(identity, welcome)

    def renew(self, agent: str) -> None:
        """Begin anew with the same workers: they are to be another job's, and listen elsewhere."""
        self._agent = agent
        self._introduction = None
        self._pending.clear()
        self._endpoints.clear()
        self._paces.clear()
        self.pulses.clear()

    def relay(self, order: AnyOrder) -> None:
        """Pass an order on to all workers; those that have not said hello hear it when they do."""
        if len(self._ranks) < self._nproc or isinstance(order, Stop):
            self._pending.append(order)
        for identity in self._ranks:
            self._send(identity, order)

    def reassure(self, heard: wire.Heard) -> None:
        """Tell the workers that are there that a controller answers."""
        for identity in self._ranks:
            self._send(identity, heard)

    def receive(self) -> Iterator[wire.Hello | FromAgent]:
        """Yield what concerns the agent or the controller; take in the rest."""
        while self.socket.poll(0):
            yield from self.receive_one()

    def receive_one(self) -> list[wire.Hello | FromAgent]:
        """Return what concerns others of the message that has come; drop what cannot be meant."""
        identity, *frames = self.socket.recv_multipart()
        try:
            message = self._take(identity, wire.decode_worker(frames))
        except ProtocolError as error:
            logger.warning("dropped a worker's message: %s", error)
            return []
        return [] if message is None else [message]

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(linger=0)

    def _take(self, identity: bytes, message: wire.FromWorker) -> wire.Hello | FromAgent | None:
        """Return the message if it is not for this object. Raises `ProtocolError` on a stranger."""
        if isinstance(message, wire.Hello):
            self._meet(identity, message.local_rank)
            return message
        local_rank = self._ranks.get(identity)
        if local_rank is None:
            msg = f"{type(message).__name__} from a worker that has not said hello"
            raise ProtocolError(msg)
        if isinstance(message, (wire.Endpoint, wire.Pulse, wire.Pace)):
            self._note(local_rank, message)
            return None
        worker = getattr(message, "worker", None)
        if worker != f"{self._agent}/{local_rank}":
            msg = f"worker {local_rank} speaks for {worker}"
            raise ProtocolError(msg)
        return message

    def _meet(self, identity: bytes, local_rank: int) -> None:
        if not 0 <= local_rank < self._nproc or local_rank in self._ranks.values():
            msg = (
                f"a worker says hello as local rank {local_rank} of {self._nproc}, or a second time"
            )
            raise ProtocolError(msg)
        self._ranks[identity] = local_rank
        for message in (*(self._introduction or ()), *self._pending):
            self._send(identity, message)

    def _note(self, local_rank: int, message: wire.Endpoint | wire.Pulse | wire.Pace) -> None:
        if isinstance(message, wire.Endpoint):
            self._endpoints[local_rank] = message.endpoint
            self._tell_siblings()
        elif isinstance(message, wire.Pace):
            self._paces[local_rank] = message.progress
        else:
            self.pulses[local_rank] = message

    def _tell_siblings(self) -> None:
        """Tell the workers where all of them listen, once all do."""
        if self._introduction is not None and self.endpoints is not None:
            job = self._introduction[1].job
            for identity in self._ranks:
                self._send(identity, wire.Siblings(job=job, endpoints=self.endpoints))

    def _send(self, identity: bytes, message: wire.FromController) -> None:
        try:
            self.socket.send_multipart([identity, *wire.encode(message)], zmq.DONTWAIT)
        except zmq.Again:  # it has not read for long: its death is noticed elsewhere
            logger.warning("worker %s does not read its orders", self._ranks[identity])
