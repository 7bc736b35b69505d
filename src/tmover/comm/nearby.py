"""Connections between processes of one host: half the cost of TCP, and found without asking.

A process that listens on an address and port listens on a Unix socket of that name too, in the
abstract namespace, which is as wide as the network namespace: who can connect to it is on the same
host. Control links do not use it, for only TCP tells that a host is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
_BUFFER = 1 << 20


def listen(endpoint: str) -> socket.socket | None:
    """Return a nonblocking socket that listens for neighbours; None if there can be none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name(endpoint))
        sock.listen(1024)
        sock.settimeout(0)
    except OSError:  # somebody has the name: neighbours come by TCP then
        sock.close()
        return None
    return sock


def connect(endpoint: str) -> socket.socket | None:
    """Return a nonblocking socket to the process at `endpoint`; None if it is no neighbour."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        sock.settimeout(0)
        sock.connect(_name(endpoint))
        if is_ours(sock):
            return sock
    sock.close()
    return None


def tune(sock: socket.socket) -> None:
    """Make a connection fast: what is in it at a time should fit the processor's cache."""
    sock.settimeout(0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)


def is_ours(sock: socket.socket) -> bool:
    """Return whether a process of the same user is at the other end."""
    return _owner(sock) == os.geteuid()


def _name(endpoint: str) -> str:
    return f"\0tmover/{endpoint}"


def _owner(sock: socket.socket) -> int:
    """Return the user id of who listens at the other end, or has connected from there."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])
