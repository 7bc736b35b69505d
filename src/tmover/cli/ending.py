"""Ctrl-C, for commands that have started things which must not be left behind."""

from __future__ import annotations

import signal
import sys
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_on_signals() -> None:
    """Have a signal raise where the command is, so that blocks end what they have started."""
    for number in ENDING:
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End everything that was started on the way out; a second Ctrl-C does not stop that."""
    del frame
    for one in ENDING:
        signal.signal(one, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
