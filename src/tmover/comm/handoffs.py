"""The sockets over which state is handed over, by epoch, and what ends them all at once.

A leaver prepares no world of the epoch it hands its state over for, so these sockets belong to the
epoch's number and not to its world: whoever is blocked in one is woken when the epoch is over.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from typing import NamedTuple

from tmover.comm.latch import Latch
from tmover.errors import Interrupted


class _Handoff(NamedTuple):
    """The hand-off of one epoch: what wakes those who connect, and the sockets of the others."""

    latch: Latch
    socks: weakref.WeakSet[socket.socket]

    def end(self, reason: str) -> None:
        self.latch.set(reason)
        for sock in list(self.socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Handoffs:
    """The hand-offs of one process. Once an epoch is over, nothing is handed over for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Handoff] = {}
        self._over: dict[int, str] = {}
        """Why; of epochs that are not passed by."""
        self._passed: tuple[float, str] = (0, "")
        """Epochs below the first are over, because of the second."""

    def latch(self, epoch: int) -> Latch:
        """Return what is set when the epoch is over. Raises `Interrupted` if it is."""
        with self._lock:
            return self._of(epoch).latch

    def keep(self, epoch: int, sock: socket.socket) -> socket.socket:
        """Shut the socket down when the epoch is over. Raises `Interrupted` if it is."""
        with self._lock:
            try:
                self._of(epoch).socks.add(sock)
            except Interrupted:
                sock.close()
                raise
        return sock

    def end(self, epoch: int, reason: str) -> None:
        """Let nothing be handed over for `epoch` any more. Twice is harmless."""
        with self._lock:
            if epoch < self._passed[0]:
                return
            self._over.setdefault(epoch, reason)
            handoff = self._open.pop(epoch, None)
        if handoff is not None:
            handoff.end(reason)

    def end_before(self, epoch: float, reason: str) -> None:
        """End those of all epochs below this one."""
        with self._lock:
            self._passed = max(self._passed, (epoch, reason))
            for past in [e for e in self._over if e < epoch]:
                del self._over[past]
            ended = [self._open.pop(e) for e in list(self._open) if e < epoch]
        for handoff in ended:
            handoff.end(reason)

    def _of(self, epoch: int) -> _Handoff:
        before, why = self._passed
        reason = why if epoch < before else self._over.get(epoch)
        if reason is not None:
            raise Interrupted(reason)
        if epoch not in self._open:
            self._open[epoch] = _Handoff(Latch(), weakref.WeakSet())
        return self._open[epoch]
