"""A command that a signal ends between two of its steps, and not in the midst of one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tmover.agent.signals import SignalPipe


class Stopped(SystemExit):
    """A signal came that ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def stop_if_asked(signals: SignalPipe) -> None:
    """Raise `Stopped` if a signal has come."""
    for number in signals.take():
        raise Stopped(number)
