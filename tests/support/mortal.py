"""A controller that dies where a test says: before or after a line, an order or a command.

Each such place is a *point*, and they have numbers: so a run that is done again up to a point is
the same run. Deadlines that are armed need no points of their own: they die with the process.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Sequence

from tmover import wire
from tmover.controller.audit import Audit
from tmover.controller.gate import Gate, Heard
from tmover.controller.journal import Entry, Journal, Settled, Snapshot
from tmover.core.orders import Order
from tmover.scheduler.slurm.run import Command, Completed, Run

_CHANGES = {"sbatch", "scancel"}
_LINES = 8
"""So many lines make a journal long enough for a snapshot."""
_ENVELOPES = (wire.Heard, wire.WhoAreYou)
"""What is said for no reason that is in the journal."""


class Crash(SystemExit):
    """The process is killed. Nothing catches it: not even a task's last words are heard."""


class Doom:
    """Decides at which point the controller dies, once; None is never."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.points: list[str] = []
        self.has_struck = False

    def meet(self, point: str) -> bool:
        """Return whether the controller dies here."""
        self.points.append(point)
        if self.has_struck or len(self.points) - 1 != self.at:
            return False
        self.has_struck = True
        return True


class Life:
    """One run of the controller. What it does after its end has no effect any more."""

    def __init__(self, doom: Doom) -> None:
        self._doom = doom
        self.is_over = False

    def point(self, what: str) -> None:
        """Go on, or die."""
        if self.is_over or self._doom.meet(what):
            self.is_over = True
            raise Crash(what)


class MortalJournal(Journal):
    """A journal whose writer can die in the middle of a line, and after each."""

    def __init__(self, directory: pathlib.Path, life: Life) -> None:
        super().__init__(directory, lines=_LINES, size=0)
        self._life = life
        self._place = directory

    def append(self, job: str, entries: Sequence[Entry]) -> None:
        for entry in entries:
            kind = type(entry.effect if isinstance(entry, Settled) else entry).__name__
            try:
                self._life.point(f"in the middle of the line {kind}")
            except Crash:
                with (self._place / f"{job}.jsonl").open("ab") as file:
                    file.write(b'{"n":')
                raise
            super().append(job, [entry])
            self._life.point(f"after the line {kind}")

    def replace(self, job: str, snapshot: Snapshot) -> None:
        self._life.point("before a snapshot")
        super().replace(job, snapshot)
        self._life.point("after a snapshot")


class MortalGate(Gate):
    """A gate without a socket, whose holder can die before and after each message."""

    def __init__(self, life: Life, deliver: Callable[[bytes, wire.FromController], None]) -> None:
        self._life = life
        self._deliver = deliver
        self.audit = Audit()
        self.inbox: asyncio.Queue[Heard] = asyncio.Queue()
        self.is_behind = False

    async def receive(self) -> Heard:
        return await self.inbox.get()

    def send(self, route: bytes, message: wire.FromController) -> bool:
        if isinstance(message, _ENVELOPES):
            self._deliver(route, message)
            return True
        what = f"{type(message).__name__} to {route.decode().partition('#')[0]}"
        order = "order " if isinstance(message, Order) else ""
        self._life.point(f"before the {order}{what}")
        self._deliver(route, message)
        self._life.point(f"after the {order}{what}")
        return True

    def close(self) -> None:
        """Have nothing to close."""


def mortal(run: Run, life: Life) -> Run:
    """Return `run` whose caller can die before and after each command that changes something."""

    def with_death(command: Command) -> Completed:
        if command.argv[0] not in _CHANGES and "update" not in command.argv:
            return run(command)
        what = " ".join(command.argv[:2])
        life.point(f"before the command {what}")
        completed = run(command)
        life.point(f"after the command {what}")
        return completed

    return with_death
