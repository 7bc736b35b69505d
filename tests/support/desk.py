"""A controller that says what the test says: a real socket, and no decisions."""

from __future__ import annotations

import os
import pathlib
import time
from types import TracebackType
from typing import TypeVar

import msgspec
import zmq

from tmover import wire
from tmover.controller import keys
from tmover.controller.client import ADDRESS_FILE, Address
from tmover.core.events import Joined
from tmover.core.orders import AnyOrder, Welcome

M = TypeVar("M")

SECRET = b"s" * keys.SECRET_BYTES


class ScriptedController:
    """Hears agents, and tells them what it is told to. Heartbeats are answered by themselves."""

    def __init__(self, state: pathlib.Path, *, boot: str = "boot1", port: int = 0) -> None:
        state.mkdir(parents=True, exist_ok=True)
        server, _ = keys.make(state)
        self.boot = boot
        self.beats: list[wire.Heartbeat] = []
        self.answers_heartbeats = True
        self._file = state / ADDRESS_FILE
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.curve_server = 1
        self._socket.curve_publickey, self._socket.curve_secretkey = server
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.port = int(address.rpartition(":")[2])
        self._routes: dict[str, bytes] = {}
        self._heard: list[wire.ToController] = []
        known = Address(address=address, pid=os.getpid(), boot=boot)
        self._file.write_bytes(msgspec.json.encode(known))

    def expect(self, kind: type[M], *, timeout_s: float = 60.0, **fields: object) -> M:
        """Return the next event of a kind with these fields; fail with what came instead."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        while True:
            for place in range(seen, len(self._heard)):
                event = self._heard[place]
                if isinstance(event, kind) and _has(event, fields):
                    del self._heard[place]
                    return event
            seen = len(self._heard)
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__} {fields} came, but {self._heard}"
            self._listen(left)

    def take(self, kind: type[M], *, wait_s: float) -> M | None:
        """Return an event of a kind if one has come, or comes next within a moment."""
        self._listen(wait_s)
        for place, event in enumerate(self._heard):
            if isinstance(event, kind):
                del self._heard[place]
                return event
        return None

    def hears_nothing(self, kind: type[object], *, beats: int = 3) -> bool:
        """Return whether no event of a kind comes for some heartbeats."""
        until = len(self.beats) + beats
        while len(self.beats) < until:
            self._listen(60.0)
        return not any(isinstance(event, kind) for event in self._heard)

    def welcome(self, joined: Joined, **fields: object) -> Welcome:
        """Greet an agent and tell it who it is: a standby, unless told otherwise."""
        self.send(wire.Greeting(job=joined.job, agent=joined.agent, boot=self.boot, secret=SECRET))
        place: dict[str, object] = {
            "launch": 1, "slot": 0, "nnodes": 2, "nproc": joined.nproc, "sandbox": True, **fields,
        }  # fmt: skip
        order = Welcome(job=joined.job, agent=joined.agent, **place)  # type: ignore[arg-type]
        self.send(order)
        return order

    def send(self, message: wire.FromController) -> None:
        """Send to the agent that the message names."""
        route = self._routes[message.agent]  # type: ignore[union-attr]
        self._socket.send_multipart([route, *wire.encode(message)])

    def refuse(self, agent: str, text: str, *, is_unknown: bool = False) -> None:
        """Refuse what an agent has said."""
        refusal = wire.RefusedReply(text=text, is_unknown=is_unknown)
        self._socket.send_multipart([self._routes[agent], *wire.encode(refusal)])

    def close(self) -> None:
        """End, as a crash would: nobody is told."""
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> ScriptedController:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _listen(self, timeout_s: float) -> None:
        if not self._socket.poll(int(timeout_s * 1000) + 1):
            return
        route, *frames = self._socket.recv_multipart()
        event = wire.decode_event(frames)
        agent = getattr(event, "agent", "")
        if agent:
            self._routes[agent] = route
        if isinstance(event, wire.Heartbeat):
            self.beats.append(event)
            if self.answers_heartbeats:
                self.send(wire.Heard(job=event.job, agent=event.agent, boot=self.boot))
        else:
            self._heard.append(event)


def _has(event: object, fields: dict[str, object]) -> bool:
    return all(getattr(event, name) == value for name, value in fields.items())


__all__ = ["SECRET", "AnyOrder", "ScriptedController"]
