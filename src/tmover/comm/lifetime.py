"""What becomes of open fabrics when their process ends, or is forked."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Mortal(Protocol):
    """Something with threads and sockets."""

    def close(self, *, bye: bool) -> None:
        """End the threads, close the sockets."""

    def disown(self) -> None:
        """Close the copies of the sockets in a forked process, and touch nothing else."""


_open: weakref.WeakSet[Mortal] = weakref.WeakSet()


def begin(mortal: Mortal) -> None:
    """Look after something until `end`."""
    _open.add(mortal)


def end(mortal: Mortal) -> None:
    """Forget about it: it is closed."""
    _open.discard(mortal)


@atexit.register
def _close_all() -> None:
    """Join the threads: one that lives when the interpreter goes aborts the process."""
    for mortal in list(_open):
        mortal.close(bye=False)


def _disown_all() -> None:
    for mortal in list(_open):
        mortal.disown()
    _open.clear()


os.register_at_fork(after_in_child=_disown_all)
