"""What is new in a job's status, as lines for people: statuses in, lines out, no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tmover.scheduler.hostlist import fold
from tmover.wire import JobStatus

NOTE = "note"
"""Stands in a phase's place before what the controller noted."""


class News(NamedTuple):
    """One thing that happened."""

    phase: str
    text: str

    def __str__(self) -> str:
        """Return the line for people."""
        return self.text if self.phase == NOTE else f"{self.phase}: {self.text}"


class Notes:
    """Yields each of the job's notes once."""

    def __init__(self, seen: tuple[str, ...] = ()) -> None:
        self._seen = seen

    def new(self, status: JobStatus) -> tuple[str, ...]:
        """Return the notes that were not there the last time."""
        before, self._seen = self._seen, status.notes
        for start in range(len(before) + 1):  # the oldest notes are dropped at the far end
            kept = before[start:]
            if status.notes[: len(kept)] == kept:
                return status.notes[len(kept) :]
        return status.notes


class MoveWatch:
    """Follows one node's move to its end."""

    def __init__(self, node: str, status: JobStatus) -> None:
        self._node = node
        self._notes = Notes(status.notes)
        self._epoch = 0
        """The last epoch in which the node was to be left."""
        self._phase = ""
        self.is_done = False
        """Whether the node carries no rank any more."""
        self.is_over = False

    def look(self, status: JobStatus) -> Iterator[News]:
        """Yield what is new."""
        notes = self._notes.new(status)
        for note in notes:
            yield News(NOTE, note)
        if not any(slot.node == self._node for slot in status.slots):
            self.is_done = self.is_over = True
            yield News("done", f"{self._node} carries no rank any more")
            return
        if status.code is not None:
            self.is_over = True
            yield News("aborted", f"the job has ended: {status.outcome}")
            return
        yield from self._look_at_move(status, gave_up=any(self._gave_up(note) for note in notes))

    def _look_at_move(self, status: JobStatus, *, gave_up: bool) -> Iterator[News]:
        move = status.move
        leaves = move is not None and self._node in move.leaver.split(", ")
        if move is not None and leaves and (move.phase, move.epoch) != (self._phase, self._epoch):
            self._phase, self._epoch = move.phase, move.epoch
            if move.epoch:
                to = f" to {move.joiner} in epoch {move.epoch}"
                yield News(move.phase, self._node + to)
            else:
                yield News("waiting", _waits_for(status))
        elif status.phase == "training" and (gave_up or self._epoch):
            self.is_over = True
            why = status.notes[-1] if status.notes else "see the controller's log"
            yield News("aborted", f"{self._node} stays where it is ({why})")
        elif not self._phase and status.phase == "training" and not status.standbys:
            self._phase = "waiting"
            yield News("waiting", _waits_for(status))

    def _gave_up(self, note: str) -> bool:
        return f"moves of {self._node} failed" in note


def _waits_for(status: JobStatus) -> str:
    """Return what a move that was asked for begins with."""
    standbys = ", ".join(f"{standby.node} {standby.state}" for standby in status.standbys)
    if status.phase != "training":
        text = f"the job is {status.phase}; the move begins when it trains and a standby is warm"
    else:
        text = f"standby {standbys}" if standbys else "there is no standby"
        text += "; the move begins when one is warm"
    return f"{text}, whether this command still runs or not"


class JobWatch:
    """Follows a job from its start to its end."""

    def __init__(self) -> None:
        self._notes = Notes()
        self._phase = ""

    def look(self, status: JobStatus) -> Iterator[News]:
        """Yield what is new."""
        for note in self._notes.new(status):
            yield News(NOTE, note)
        if status.phase != self._phase:
            self._phase = status.phase
            yield News(status.phase, summary(status))


def summary(status: JobStatus) -> str:
    """Return where the job is, in one line."""
    step = "no step yet" if status.step is None or status.step < 0 else f"step {status.step}"
    nodes = fold(slot.node for slot in status.slots if slot.node) or "none"
    standbys = ", ".join(f"{standby.node} {standby.state}" for standby in status.standbys)
    return (
        f"job {status.job} {status.phase}, {step}, epoch {status.epoch}, "
        f"nodes {nodes}, standby {standbys or 'none'}"
    )
