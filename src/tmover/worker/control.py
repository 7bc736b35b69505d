"""The worker's line to its agent: one thread that owns one ZeroMQ socket.

Whatever the main thread is doing (a long backward, a compiled graph), orders are heard here. Other
threads hand messages over through a queue and a pipe that wakes the poller.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from tmover import wire
from tmover.errors import ProtocolError

logger = logging.getLogger(__name__)

_LINGER_MS = 2000
_NOTE_S = 0.25
"""What is noted waits so long at most: half as long as an agent from heartbeat to heartbeat."""


class Control:
    """Sends to the agent, and calls `on_message` in its own thread for what the agent says."""

    def __init__(
        self,
        address: str,
        *,
        hello: wire.Hello,
        on_message: Callable[[wire.FromController], None],
        on_failure: Callable[[BaseException], None],
        on_look: Callable[[], wire.FromWorker | None] = lambda: None,
        look_s: float | None = None,
    ) -> None:
        """`on_look` is asked every `look_s` for something to say; with None it never is."""
        self._address = address
        self._hello = hello
        self._on_message = on_message
        self._on_failure = on_failure
        self._on_look = on_look
        self._look_s = look_s
        self._noted: deque[wire.FromWorker] = deque(maxlen=1)
        """What is to be said with the next thing that is, or soon."""
        self._outbox: queue.SimpleQueue[wire.FromWorker | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="tmover-control", daemon=True)
        self._is_closed = False

    def start(self) -> None:
        """Connect and start listening."""
        self._thread.start()

    def send(self, message: wire.FromWorker) -> None:
        """Send, from any thread. Never blocks."""
        self._outbox.put(message)
        self._wake()

    def note(self, message: wire.FromWorker) -> None:
        """Have it sent soon, from any thread, unless another is noted first: wakes nobody."""
        self._noted.append(message)

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._outbox.put(None)
        self._wake()
        if self._is_closed or threading.current_thread() is self._thread:
            return
        if self._thread.ident is not None:
            self._thread.join(_LINGER_MS / 1000 + 5)
        self._is_closed = True
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        if self._is_closed:
            return
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups: one is enough
            os.write(self._wake_write, b"w")

    def _run(self) -> None:
        context = zmq.Context(io_threads=1)
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            socket.connect(self._address)
            socket.send_multipart(wire.encode(self._hello))
            self._serve(socket)
        except Exception as error:  # noqa: BLE001 - a thread's edge: without it no order is heard
            self._on_failure(error)
        finally:
            socket.close()
            context.term()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        look_at = time.monotonic()
        while True:
            if self._look_s is not None and time.monotonic() >= look_at:
                look_at = time.monotonic() + self._look_s
                self._look(socket)
            ready = dict(poller.poll(self._patience_ms(look_at)))
            if self._noted:
                socket.send_multipart(wire.encode(self._noted.popleft()))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                if not self._flush(socket):
                    return
            if socket in ready:
                self._receive(socket)

    def _patience_ms(self, look_at: float) -> int:
        left = math.inf if self._look_s is None else max(0.0, look_at - time.monotonic())
        return math.ceil(min(left, _NOTE_S) * 1000)

    def _look(self, socket: zmq.Socket[bytes]) -> None:
        """Say what there is to say of the other threads."""
        try:
            message = self._on_look()
        except Exception as error:  # nobody's training ends because it could not be looked at
            logger.warning("could not say how this rank gets on: %r", error, exc_info=error)
            self._look_s = message = None
        if message is not None:
            socket.send_multipart(wire.encode(message))

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Send what is queued; False when the last word was said."""
        while True:
            try:
                message = self._outbox.get_nowait()
            except queue.Empty:
                return True
            if message is None:
                return False
            socket.send_multipart(wire.encode(message))

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        try:
            message = wire.decode_order(socket.recv_multipart())
        except ProtocolError as error:
            logger.warning("dropped a message from the agent: %s", error)
            return
        self._on_message(message)
