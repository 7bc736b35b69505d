"""The processes that the agent started or adopted: collected, and ended with it."""

from __future__ import annotations

import logging
import os
import signal
import time

from tmover.process import descendants, identify, send_signal, wait_gone

logger = logging.getLogger(__name__)

_DIE_S = 10.0


def reap_children() -> None:
    """Collect every child that has ended, adopted ones too."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_children() -> None:
    """Kill whatever this process started or adopted, and collect it."""
    me = identify(os.getpid())
    deadline = time.monotonic() + _DIE_S
    while time.monotonic() < deadline:
        left = descendants(os.getpid()) - {me}
        for process in left:
            send_signal(process, signal.SIGKILL)
        wait_gone(left, timeout_s=_DIE_S)
        reap_children()
        if not left:
            return
    logger.error("processes %s do not end, though killed", sorted(p.pid for p in left))
