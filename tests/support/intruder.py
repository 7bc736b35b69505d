"""What a second user of the machine tries with somebody else's job. Run as that user, with JSON.

Prints one line for each thing that it could do and should not have been able to: nothing if all is
well. `python intruder.py KIND JSON`; each kind is a function below.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Sequence

import zmq

from tmover import wire
from tmover.comm.handshake import MAGIC, Dialer, Hello
from tmover.comm.latch import Latch
from tmover.core.events import Joined
from tmover.errors import LinkError

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
_PATIENCE_MS = 20_000


def files(*, paths: Sequence[str]) -> Iterator[str]:
    """Read, write, replace and add what lies in the first user's directories."""
    for name in paths:
        path = pathlib.Path(name)
        for what, flags in (("read", os.O_RDONLY), ("written", os.O_WRONLY)):
            with contextlib.suppress(OSError):
                os.close(os.open(path, flags))
                if not (path.is_dir() and what == "read"):
                    yield f"{path} can be {what}"
        with contextlib.suppress(OSError):
            (path / "intruder").symlink_to("/etc/passwd")
            yield f"{path} takes links"
        with contextlib.suppress(OSError):
            path.rename(f"{path}.mine")
            yield f"{path} can be moved away"
        with contextlib.suppress(OSError):
            path.chmod(0o777)
            yield f"{path} can be opened"


def processes(*, pids: Sequence[int]) -> Iterator[str]:
    """Signal the first user's processes, and look into them."""
    for pid in pids:
        for number in (0, signal.SIGUSR1, signal.SIGSTOP, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
                yield f"{pid} takes signal {number}"
        for part in ("environ", "mem", "maps", "fd/0", "cwd/x", "root/x"):
            with (
                contextlib.suppress(OSError),
                pathlib.Path(f"/proc/{pid}/{part}").open("rb") as file,
            ):
                if file.read(1):  # of one that has just ended there is nothing to read
                    yield f"{part} of {pid} can be read"


def controller(*, address: str, server: str, job: str) -> Iterator[str]:
    """Speak to the controller without a key, with a made-up one, and with its own as ours."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    own = zmq.curve_keypair()
    joined = Joined(job=job, agent="n-1", node="n", address="", nproc=1, standby=True)
    wanted = [
        wire.encode(message)
        for message in (wire.StatusRequest(), wire.CancelRequest(job=job, reason="envy"), joined)
    ]
    for kind, key in (
        ("no key", None),
        ("a key", own),
        ("a forged key", (server.encode(), own[1])),
    ):
        peer = context.socket(zmq.DEALER)
        monitor = peer.get_monitor_socket(_FAILED)
        if key is not None:
            peer.curve_serverkey = server.encode()
            peer.curve_publickey, peer.curve_secretkey = key
        peer.connect(address)
        for frames in wanted:
            peer.send_multipart(frames)
        if not monitor.poll(_PATIENCE_MS):
            yield f"with {kind} it is not turned away"
        if peer.poll(0):
            yield f"with {kind} it is answered: {peer.recv_multipart()!r}"
        peer.disable_monitor()
        monitor.close(linger=0)
        peer.close(linger=0)
    context.term()


def links(*, endpoints: Sequence[str], job: str) -> Iterator[str]:
    """Be a rank of the job, by TCP and by Unix socket; say rubbish; stay, with many others."""
    hello = Hello(job=job, epoch=1, group="", lane="data", sender="n-1/0", receiver="?")
    long = MAGIC + struct.pack("<H", 65535) + b"x" * 65535
    latch = Latch()
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        dialer = Dialer(hello, b"\0" * 32)
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(dialer.start())
            try:
                dialer.feed(_exactly(sock, dialer.needs))
                yield f"{endpoint} proves our secret"
            except (LinkError, OSError):
                pass
        for said in (b"GET / HTTP/1.1\r\n\r\n", long, dialer.start() + b"\0" * 32):
            with socket.create_connection((host, int(port)), timeout=20) as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(said)
                if not _is_closed(sock):
                    yield f"{endpoint} goes on talking after {said[:20]!r}"
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with near:
            near.settimeout(20)
            near.connect(f"\0tmover/{endpoint}")
            if not _is_closed(near):
                yield f"the Unix socket of {endpoint} lets others in"
    latch.close()


def crowd(*, endpoints: Sequence[str], count: int) -> Iterator[str]:
    """Hold many connections open to each listener, until told to end."""
    held = []
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((host, int(port)), timeout=1))
    sys.stderr.write(f"{len(held)} held\n")
    sys.stderr.flush()
    sys.stdin.read()
    yield from ()


def agents(*, names: Sequence[str]) -> Iterator[str]:
    """Speak to the sockets between an agent and its workers."""
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(20)
            sock.connect("\0" + name)
            with contextlib.suppress(OSError):
                sock.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48)
            if not _is_closed(sock):
                yield f"@{name} lets others in"


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            msg = "hung up"
            raise ConnectionError(msg)
        data += more
    return data


def _is_closed(sock: socket.socket) -> bool:
    """Return whether the other end hangs up; what it says before does not matter."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def main() -> None:
    """Try one kind of things."""
    kind, given = sys.argv[1], json.loads(sys.argv[2])
    for line in globals()[kind](**given):
        print(line, flush=True)


if __name__ == "__main__":
    main()
