"""Signals as something readable."""

from __future__ import annotations

import os
import signal

from tmover.agent.signals import SignalPipe


def test_a_signal_that_came_while_it_was_blocked_becomes_readable() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        os.kill(os.getpid(), signal.SIGUSR1)

        with SignalPipe([signal.SIGUSR1]) as pipe:
            assert pipe.take() == [signal.SIGUSR1]

        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
