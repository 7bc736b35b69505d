"""The agent's line to the controller: joined again whenever the controller may have forgotten.

Nothing that was sent into a broken connection is lost for good: the latest event of each kind, of
each worker, is kept, and said again to a controller that asks who this is, or that was away.
"""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import zmq

from tmover import wire
from tmover.config import AgentConfig
from tmover.controller.client import Channel, Connection
from tmover.core.events import FromAgent, Joined
from tmover.core.orders import Stop
from tmover.environment import AgentEnvironment
from tmover.errors import ConfigError, ControllerUnavailable, ProtocolError

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_SILENT_BEATS = 6
"""After so many heartbeats without an answer the agent joins again."""


Connect = Callable[[pathlib.Path, "zmq.Context[zmq.Socket[bytes]]"], Channel]
"""Opens a channel to the controller of a state directory."""


class Uplink:
    """Keeps the agent known to whatever controller runs on the state directory."""

    def __init__(
        self,
        place: AgentEnvironment,
        joined: Joined,
        config: AgentConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        connect: Connect = Channel,
    ) -> None:
        self._place = place
        self._open = connect
        self.joined = joined
        self._config = config
        self._context = context
        self._channel: Channel | None = None
        self._kept: dict[tuple[str, str], FromAgent] = {}
        self._boot = ""
        self._known = False
        """Whether the controller has answered on this connection."""
        self._unsaid = True
        """Whether something could not be sent, so that everything is said again."""
        self._heard_at = 0.0
        self._retry_s = _FIRST_RETRY_S
        self._due = 0.0
        self._why = ""
        self.ever_known = False
        """Whether a controller has ever answered."""

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Readable when the controller has said something."""
        return () if self._channel is None else (self._channel.socket,)

    @property
    def due(self) -> float:
        """When `tick` wants to be called again."""
        return self._due

    @property
    def silent_since(self) -> float | None:
        """Since when no controller answers, or None if one does."""
        return None if self._known else self._heard_at

    def tell(self, event: FromAgent) -> None:
        """Send an event, and keep it until a later one of its kind replaces it."""
        key = (type(event).__name__, getattr(event, "worker", ""))
        self._kept.pop(key, None)
        self._kept[key] = event
        self._send(event)

    def repeat(self) -> None:
        """Say everything again at the next tick, as if it had not been heard."""
        self._unsaid = True

    def forget(self) -> None:
        """Keep nothing any more: the workers that said it are gone."""
        self._kept.clear()

    def answer(self, event: wire.FromNode) -> None:
        """Send what means nothing later."""
        self._send(event)

    def tick(self, now: float, heartbeat: wire.Heartbeat) -> None:
        """Connect, join again or send a heartbeat, whatever is due."""
        self._heard_at = self._heard_at or now
        channel = self._channel or self._connect(now)
        if now < self._due or channel is None:
            return
        if channel.look() is not Connection.OPEN:
            self._known = False
            channel.follow()
        silent_s = _SILENT_BEATS * self._config.heartbeat_s
        if self._known and now - self._heard_at > silent_s:
            self._known = False
        if self._unsaid or not self._known:
            self._say_all()
        self._send(heartbeat)
        if self._known and not self._unsaid:
            self._due = now + self._config.heartbeat_s
        else:
            self._back_off(now)

    def receive(self, now: float) -> Iterator[wire.FromController]:
        """Yield orders and envelopes that the agent must act on."""
        while self._channel is not None:
            try:
                message = self._channel.receive()
            except ProtocolError as error:
                logger.warning("dropped a message from the controller: %s", error)
                continue
            if message is None:
                return
            self._note(message, now)
            if not isinstance(message, (wire.Heard, wire.WhoAreYou)):
                yield message

    def flush(self, heartbeat: wire.Heartbeat, *, timeout_s: float) -> None:
        """Wait until the controller has heard everything: it answers a heartbeat after the rest."""
        deadline = time.monotonic() + timeout_s
        if self._channel is None or not self._send(heartbeat):
            return
        while (left := deadline - time.monotonic()) > 0 and self._channel.wait(zmq.POLLIN, left):
            if isinstance(self._channel.receive(), (wire.Heard, Stop)):
                return

    def explain(self) -> str:
        """Return one line on why no controller answers."""
        return self._why if self._channel is None else self._channel.explain()

    def wrong_key(self) -> bool:
        """Whether the controller is there and does not accept our key, or is not ours."""
        wrong = (Connection.REFUSED, Connection.STRANGER)
        return self._channel is not None and self._channel.look() in wrong

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect(self, now: float) -> Channel | None:
        if now >= self._due:
            try:
                self._channel = self._open(self._place.state, self._context)
            except (ControllerUnavailable, ConfigError) as error:
                if isinstance(error, ConfigError) and not self.ever_known:
                    raise
                self._why = str(error)
                self._back_off(now)
        return self._channel

    def _back_off(self, now: float) -> None:
        self._due = now + self._retry_s
        self._retry_s = min(self._retry_s * 2, self._config.retry_s)

    def _note(self, message: wire.FromController, now: float) -> None:
        self._heard_at = now
        if isinstance(message, wire.WhoAreYou):
            self._boot = message.boot
            self._say_all()
            return
        if isinstance(message, wire.RefusedReply):
            return
        if isinstance(message, (wire.Greeting, wire.Heard)):
            self._boot = message.boot
        if not self._known:
            self._known = self.ever_known = True
            self._retry_s = _FIRST_RETRY_S
            self._due = now

    def _say_all(self) -> None:
        self._unsaid = False
        for event in (self.joined, *self._kept.values()):
            if not self._send(event):
                return

    def _send(self, message: wire.ToController) -> bool:
        if self._channel is not None and self._channel.send(message):
            return True
        self._known, self._unsaid = False, True
        return False
