"""The sockets of a library that does not show them, found by the addresses it has published."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import stat
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

_OPEN = pathlib.Path("/proc/self/fd")


class Handle(NamedTuple):
    """A socket of somebody else's. Its number may be used again, its inode not while it lives."""

    fd: int
    inode: int
    connected: bool

    def shut_down(self) -> None:
        """End the connection, so that who waits for it is woken. Never a listening socket's."""
        if not self.connected:
            return
        with contextlib.suppress(OSError):
            copy = os.dup(self.fd)
            with socket.socket(fileno=copy) as sock:  # a copy: the number cannot change hands
                if os.fstat(copy).st_ino == self.inode:
                    sock.shutdown(socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        """Close the copy of it in a process that was forked from this one."""
        with contextlib.suppress(OSError):
            if os.fstat(self.fd).st_ino == self.inode:
                os.close(self.fd)


def speaking(addresses: bytes) -> list[Handle]:
    """Return the sockets of this process with one of these addresses, at either end.

    `addresses` are kernel structures, with whatever lies between them. No program started from here
    shall inherit what is found.
    """
    found = []
    for fd, inode, sock in _all():
        local, remote = _packed(_name(sock.getsockname)), _packed(_name(sock.getpeername))
        if any(packed and packed in addresses for packed in (local, remote)):
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)  # noqa: FBT003 - it takes no keyword
            found.append(Handle(fd, inode, connected=bool(remote)))
    return found


def _all() -> Iterator[tuple[int, int, socket.socket]]:
    """Return every socket of this process, by number and inode."""
    for entry in _OPEN.iterdir():
        with contextlib.suppress(OSError):  # closed by another thread meanwhile
            fd = int(entry.name)
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                sock = socket.socket(fileno=fd)
                try:
                    yield fd, status.st_ino, sock
                finally:
                    sock.detach()


def _name(ask: Any) -> Any:
    try:
        return ask()
    except OSError:
        return None


def _packed(name: Any) -> bytes:
    """Return an address as the kernel writes it, without what follows; nothing if it has no port.

    >>> _packed(("127.0.0.1", 80)).hex(), _packed("/a/path"), _packed(("127.0.0.1", 0))
    ('020000507f000001', b'', b'')
    """
    if not isinstance(name, tuple) or not name[1]:
        return b""
    host, port = name[:2]
    if ":" in host:
        scope = struct.pack("!I", name[2])
        address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        return struct.pack("=H", socket.AF_INET6) + struct.pack("!H", port) + scope + address
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
