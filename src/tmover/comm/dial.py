"""Open a link: dial the other end, or wait for it to dial here."""

from __future__ import annotations

import os
import select
import socket
import time

from tmover.comm.handshake import Dialer, Hello
from tmover.comm.latch import Latch
from tmover.errors import Interrupted, LinkError


def dial(
    endpoint: str, hello: Hello, *, secret: bytes, source: str, latch: Latch, deadline: float
) -> socket.socket:
    """Return a nonblocking socket to `endpoint` that has introduced itself.

    Raises `LinkError` if nobody is there, refuses, or does not answer by the deadline, and
    `Interrupted` once the latch is set.
    """
    host, _, port = endpoint.rpartition(":")
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(0)
        sock.bind((source, 0))
        ready = _Ready(sock, latch, deadline)
        _connect(sock, (host, int(port)), ready)
        dialer = Dialer(hello, secret)
        sock.send(dialer.start())
        while not dialer.done:
            reply = dialer.feed(_read(sock, dialer.needs, ready))
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


class _Ready:
    """Waits for a socket, a latch, or a deadline."""

    def __init__(self, sock: socket.socket, latch: Latch, deadline: float) -> None:
        self._sock = sock
        self._latch = latch
        self._deadline = deadline

    def wait(self, mask: int) -> None:
        poller = select.poll()
        poller.register(self._sock, mask)
        poller.register(self._latch.fd, select.POLLIN)
        events = poller.poll(max(0.0, self._deadline - time.monotonic()) * 1000)
        if self._latch.is_set:
            raise Interrupted(self._latch.reason)
        if not events:
            msg = "no answer in time"
            raise TimeoutError(msg)


def _connect(sock: socket.socket, address: tuple[str, int], ready: _Ready) -> None:
    try:
        sock.connect(address)
    except BlockingIOError:
        ready.wait(select.POLLOUT)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code)) from None


def _read(sock: socket.socket, size: int, ready: _Ready) -> bytes:
    data = b""
    while len(data) < size:
        try:
            chunk = sock.recv(size - len(data))
        except BlockingIOError:
            ready.wait(select.POLLIN)
            continue
        if not chunk:
            msg = "the other end hung up"
            raise ConnectionError(msg)
        data += chunk
    return data
