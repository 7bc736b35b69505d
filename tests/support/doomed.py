"""A real controller process that kills itself (SIGKILL) at a point that a test names.

    python -m support.doomed line Prepared 2 controller --state DIR    after the second such line
    python -m support.doomed order Arm 1 controller --state DIR        after the first such order

The line is on disk then, and nothing was done about it; the order is on its way, and nothing after.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Sequence

from tmover import wire
from tmover.cli.main import main
from tmover.controller.gate import Gate
from tmover.controller.journal import Entry, Journal, Settled
from tmover.process import spawn_apart


class Doomed:
    """Starts controllers: the first dies at a point, those after it live."""

    def __init__(self, what: str, kind: str, count: int) -> None:
        self._point = [what, kind, str(count)]
        self._has_started = False

    def __call__(self, state: pathlib.Path, log: pathlib.Path) -> int:
        tool = ["tmover"] if self._has_started else ["support.doomed", *self._point]
        self._has_started = True
        argv = [sys.executable, "-m", *tool, "controller", "--state", str(state)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return spawn_apart(argv, env, log)


class _Countdown:
    """Kills this process when it has met the kind so often."""

    def __init__(self, kind: str, count: int) -> None:
        self._kind, self._left = kind, count

    def meet(self, thing: object) -> None:
        self._left -= type(thing).__name__ == self._kind
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _arm(what: str, countdown: _Countdown) -> None:
    append, send = Journal.append, Gate.send

    def append_and_die(journal: Journal, job: str, entries: Sequence[Entry]) -> None:
        for entry in entries:  # one by one: it is to be the last line there is
            append(journal, job, [entry])
            countdown.meet(entry.effect if isinstance(entry, Settled) else entry)

    def send_and_die(gate: Gate, route: bytes, message: wire.FromController) -> bool:
        sent = send(gate, route, message)
        countdown.meet(message)
        return sent

    if what == "line":
        Journal.append = append_and_die  # type: ignore[method-assign,assignment]
    else:
        Gate.send = send_and_die  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    _, place, name, times, *rest = sys.argv
    sys.argv[1:] = rest
    _arm(place, _Countdown(name, int(times)))
    main()
