"""Several ranks that hold the same send a state together: the ends beside the first source's.

Every further source sends its chunks over a connection of its own. They go where the first source's
go, each verified before it touches a live tensor. The state has come when all have sent their part;
if one breaks, all of it is void.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tmover.errors import LinkError, StateError
from tmover.state import memory, shares
from tmover.state.capture import Tracked, capture
from tmover.state.frames import CHUNK_BYTES, Kind, Pipe
from tmover.state.landing import Landing
from tmover.state.memory import Area
from tmover.state.messages import (
    Answer,
    Hello,
    Opened,
    Purpose,
    Stream,
    check_closing,
    hear_answer,
    hear_hello,
    hello_of,
    receive_tensors,
    send_closing,
    send_tensors,
)
from tmover.state.shares import Range

Connect = Callable[[], socket.socket]
"""Returns the connection to the other end. Raises `LinkError` if it does not come."""


def send_share(
    connect: Connect,
    purpose: Purpose,
    *,
    tracked: Tracked,
    source: int,
    available: int,
    peer: str,
    timeout_s: float,
) -> int:
    """Send the part of the source with this number, from 1; return how many bytes it has.

    `available` sources could take part. If fewer do, because the state is small, there may be
    nothing to do here, and nothing is connected. Raises as `transfer.send_state` does.
    """
    captured = capture(tracked, sources=available)
    if source >= captured.sources:
        return 0
    memory.synchronize(captured.tensors)
    hello = hello_of(captured, purpose, schema=tracked.seat(), source=source)
    part = shares.split(captured.layouts, captured.alike, captured.sources)[source]
    with connect() as sock:
        pipe = Pipe(sock, peer=peer, timeout_s=timeout_s)
        pipe.send(Kind.HELLO, [msgspec.msgpack.encode(hello)])
        hear_answer(pipe, peer)
        pipe.bind(hello.context())
        send_tensors(pipe, captured, part)
        send_closing(pipe, purpose.step, part)
        hear_answer(pipe, peer)
    return sum(stop - start for start, stop in part)


class _Source(threading.Thread):
    """One source beside the first: receives its part."""

    def __init__(
        self, hello: Hello, part: Sequence[Range], stream: Stream, peer: str, connect: Connect
    ) -> None:
        """`hello`: what it must say."""
        super().__init__(name="tmover-handoff", daemon=True)
        self._expected = hello
        self._part = part
        self._stream = stream
        self._peer = peer
        self._connect = connect
        self._writing = threading.Lock()
        self._ended = False
        self._sock: socket.socket | None = None
        self.error: Exception | None = None
        self.timeout_s = 0.0
        self.pinned = False

    def end(self) -> None:
        """Return once it writes nothing any more."""
        with self._writing:
            self._ended = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Receive; keep what that breaks by."""
        try:
            with self._connect() as self._sock:
                self._receive(self._sock)
        except StateError as error:
            self.error = LinkError(str(error), (self._peer,))
        except Exception as error:  # noqa: BLE001 - a thread's edge: `Gathering.complete` raises it
            self.error = error

    def _receive(self, sock: socket.socket) -> None:
        pipe = Pipe(sock, peer=self._peer, timeout_s=self.timeout_s)
        area = Area(CHUNK_BYTES, pinned=self.pinned)
        hello = hear_hello(pipe, area, self._peer)
        refusal = self._refusal(hello)
        pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(Answer(refusal))])
        if refusal:
            msg = f"a part of the state, from {self._peer}, was refused: {refusal}"
            raise StateError(msg)
        pipe.bind(hello.context())
        receive_tensors(pipe, self._part, self._put, area)
        check_closing(pipe, hello.step, self._part, area)
        pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(Answer())])

    def _refusal(self, hello: Hello) -> str:
        """Return why a part does not belong to what the first source sends, or nothing."""
        wrong = [
            name
            for name in hello.__struct_fields__
            if name != "keeping" and getattr(hello, name) != getattr(self._expected, name)
        ]
        return f"not the same as of the first source: {', '.join(wrong)}" if wrong else ""

    def _put(self, start: int, stop: int, area: Area) -> None:
        with self._writing:
            if self._ended:
                msg = "the hand-off is over"
                raise LinkError(msg)
            self._stream.write(start, stop, area)


class Gathering:
    """A state that several sources send: receives the parts of all but the first one.

    To be left by `with`: after that no thread touches a live tensor any more.
    """

    def __init__(
        self,
        hello: Hello,
        landing: Landing,
        others: Mapping[str, Connect],
        *,
        timeout_s: float,
    ) -> None:
        """Take the first source's `hello`; `others` are the further ones, by name, in their order.

        Raises `StateError` if it counts on more of them.
        """
        if not 1 <= hello.sources <= 1 + len(others):
            msg = f"{hello.sources} sources are to send it, and {1 + len(others)} are known here"
            raise StateError(msg)
        parts = shares.split(landing.layouts, landing.alike, hello.sources)
        self.first = parts[0]
        """The first source's part."""
        self._landing = landing
        self._opened = Opened()
        self._sources = [
            _Source(hello.of_source(number), part, self.stream(), peer, connect)
            for number, (part, (peer, connect)) in enumerate(
                zip(parts[1:], others.items(), strict=False), start=1
            )
        ]
        for source in self._sources:
            source.timeout_s = timeout_s
            source.pinned = landing.is_remote

    def __enter__(self) -> Gathering:
        for source in self._sources:
            source.start()
        return self

    def __exit__(self, *error: object) -> None:
        for source in self._sources:
            source.end()

    def stream(self) -> Stream:
        """Return where a part goes: one for each thread."""
        return Stream(self._landing.tensors, self._landing.layouts, self._opened)

    def complete(self) -> None:
        """Return once all other parts have come. Raises what one of them broke by."""
        for source in self._sources:
            source.join()
        for source in self._sources:
            if source.error is not None:
                raise source.error
