"""Open links by dialing: one, or many at once, so that who never answers keeps nobody waiting.

A conversation is a generator: it says for what it waits, and whoever drives it waits for many.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Generator, Iterable
from typing import NamedTuple, TypeVar

from tmover.comm import nearby
from tmover.comm.handshake import Dialer, Hello
from tmover.comm.latch import Latch
from tmover.errors import Interrupted, LinkError

T = TypeVar("T")


class Wait(NamedTuple):
    """What a conversation waits for."""

    sock: socket.socket
    mask: int


Conversation = Generator[Wait, None, T]


def dial(
    endpoint: str, hello: Hello, *, secret: bytes, source: str, latch: Latch, deadline: float
) -> socket.socket:
    """Return a nonblocking socket to `endpoint` that has introduced itself.

    Raises `LinkError` if nobody is there, refuses, or does not answer by the deadline, and
    `Interrupted` once the latch is set.
    """
    opened: list[socket.socket] = []

    def one() -> Conversation[None]:
        opened.append((yield from introduce(endpoint, hello, secret=secret, source=source)))

    errors = converse([one()], latch=latch, deadline=deadline)
    if errors:
        raise errors.pop()
    return opened[0]


def introduce(
    endpoint: str, hello: Hello, *, secret: bytes, source: str, near: bool = False
) -> Conversation[socket.socket]:
    """Connect and introduce oneself; what comes of it is as `dial` says.

    `near`: inside the host, if `endpoint` is on this one.
    """
    neighbour = nearby.connect(endpoint) if near else None
    sock = neighbour or socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if neighbour is None:
            yield from _connect(sock, endpoint, source)
        dialer = Dialer(hello, secret)
        sock.send(dialer.start())
        while not dialer.done:
            reply = dialer.feed((yield from _read(sock, dialer.needs)))
            if reply:
                sock.send(reply)
    except OSError as error:
        sock.close()
        msg = f"no link to {hello.receiver} at {endpoint}: {error}"
        raise LinkError(msg, (hello.receiver,)) from error
    except BaseException:
        sock.close()
        raise
    return sock


def converse(
    conversations: Iterable[Conversation[None]], *, latch: Latch, deadline: float
) -> list[LinkError]:
    """Carry all of them on at once; return how those failed that did.

    Raises `Interrupted` once the latch is set.
    """
    errors: list[LinkError] = []
    waiting: dict[Conversation[None], Wait] = {}
    try:
        for conversation in conversations:
            _go_on(conversation, waiting, errors)
        while waiting:
            ready = _wait(waiting, latch, deadline)
            for conversation in ready or list(waiting):
                _go_on(conversation, waiting, errors, late=not ready)
    finally:
        for conversation in waiting:
            conversation.close()
    return errors


def _go_on(
    conversation: Conversation[None],
    waiting: dict[Conversation[None], Wait],
    errors: list[LinkError],
    *,
    late: bool = False,
) -> None:
    """Let one go on until it waits again, or ends: by itself, or because it is late."""
    waiting.pop(conversation, None)
    try:
        if late:
            conversation.throw(TimeoutError("no answer in time"))
        else:
            waiting[conversation] = next(conversation)
    except StopIteration:
        return
    except LinkError as error:
        errors.append(error.with_traceback(None))  # which would hold this list, and so itself


def _wait(
    waiting: dict[Conversation[None], Wait], latch: Latch, deadline: float
) -> list[Conversation[None]]:
    """Return those that can go on; none after the deadline."""
    poller = select.poll()
    poller.register(latch.fd, select.POLLIN)
    by_fd = {}
    for conversation, (sock, mask) in waiting.items():
        poller.register(sock, mask)
        by_fd[sock.fileno()] = conversation
    events = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
    if latch.is_set:
        raise Interrupted(latch.reason)
    return [by_fd[fd] for fd, _ in events if fd in by_fd]


def _connect(sock: socket.socket, endpoint: str, source: str) -> Conversation[None]:
    host, _, port = endpoint.rpartition(":")
    sock.settimeout(0)
    sock.bind((source, 0))
    try:
        sock.connect((host, int(port)))
    except BlockingIOError:
        yield Wait(sock, select.POLLOUT)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code)) from None


def _read(sock: socket.socket, size: int) -> Conversation[bytes]:
    data = b""
    while len(data) < size:
        try:
            chunk = sock.recv(size - len(data))
        except BlockingIOError:
            yield Wait(sock, select.POLLIN)
            continue
        if not chunk:
            msg = "the other end hung up"
            raise ConnectionError(msg)
        data += chunk
    return data
