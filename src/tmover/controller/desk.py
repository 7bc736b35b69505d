"""The jobs, and their journal: the one place where a job changes.

`write` puts entries into the journal, `take_in` applies one of them. At a start the same `take_in`
is fed from the journal, so what a restarted controller knows is what the one before knew: the jobs,
and what the scheduler still owes them.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from tmover.controller.journal import Entry, Journal, Settled
from tmover.core.events import (
    REQUEUE,
    AnyEvent,
    DeadlinePassed,
    StandbysGone,
    Submitted,
    Wait,
)
from tmover.core.job import Job, decide
from tmover.core.orders import (
    Action,
    EndJob,
    EndNode,
    Errand,
    Note,
    OrderNode,
    ReassignNode,
    ReleaseNode,
)
from tmover.core.phase import Stage
from tmover.errors import JournalError

logger = logging.getLogger(__name__)

NOTES_KEPT = 20
Decide = Callable[[Job, AnyEvent], tuple[Job, list[Action]]]


class Ledger:
    """One job, and what is under way for it outside of `decide`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.notes: collections.deque[str] = collections.deque(maxlen=NOTES_KEPT)
        self.effects: list[Errand] = []
        """What the scheduler was asked and has not yet done."""

    def note(self, text: str, at: float) -> None:
        """Keep a sentence for people."""
        self.notes.append(f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}")


class Desk:
    """All jobs of this controller."""

    def __init__(self, journal: Journal, decide: Decide = decide) -> None:
        """Take over what is in the journal. Raises `JournalError`."""
        self._journal = journal
        self._decide = decide
        self.ledgers: dict[str, Ledger] = {}
        histories = {job: journal.replay(job) for job in journal.jobs()}
        for job, entries in sorted(histories.items(), key=_age):
            for entry in entries:
                self.take_in(entry)
            logger.info("replayed %s entries of job %s", len(entries), job, extra={"job_id": job})
        self._next = int(journal.next_id())

    def jobs(self) -> list[Job]:
        """Return all jobs, those too that have ended."""
        return [ledger.job for ledger in self.ledgers.values()]

    def new_id(self) -> str:
        """Return the id of a job to be."""
        self._next += 1
        return str(self._next - 1)

    def looked_after(self) -> dict[str, Job]:
        """Return the jobs in allocations of the scheduler that have not ended.

        Those too that have ended to be requeued, until the scheduler has made its mind up.
        """
        return {
            name: ledger.job
            for name, ledger in self.ledgers.items()
            if ledger.job.allocated
            and (ledger.job.phase.stage is not Stage.ENDED or _may_be_requeued(ledger))
        }

    def is_ordering(self, job: str) -> bool:
        """Return whether the scheduler has not taken all orders of a job yet."""
        return any(isinstance(effect, OrderNode) for effect in self.ledgers[job].effects)

    def write(self, entries: Sequence[Entry]) -> set[str]:
        """Have the entries on disk; return the jobs whose journal could not be written."""
        by_job: dict[str, list[Entry]] = {}
        for entry in entries:
            by_job.setdefault(entry.job, []).append(entry)
        return {job for job, some in by_job.items() if not self._append(job, some)}

    def _append(self, job: str, entries: Sequence[Entry]) -> bool:
        try:
            self._journal.append(job, entries)
        except JournalError as error:
            logger.error("%s; nothing is decided for job %s until it can", error, job)
            return False
        return True

    def take_in(self, entry: Entry) -> list[Action] | None:
        """Apply an entry of the journal; return what is to be done, as far as `decide` said.

        None if it could say nothing: then the job stays as it was, here and after a restart.
        """
        ledger = self.ledgers.get(entry.job)
        if isinstance(entry, Submitted) and ledger is None:
            ledger = self.ledgers[entry.job] = Ledger(Job(name=entry.job))
        if ledger is None:
            return []
        if isinstance(entry, Settled):
            if entry.effect in ledger.effects:
                ledger.effects.remove(entry.effect)
                if entry.note:
                    ledger.note(entry.note, entry.at)
            return []
        if _ends_order(entry, ledger.job.ordered.epoch):  # what has not come is ordered anew
            ledger.effects = [e for e in ledger.effects if not isinstance(e, OrderNode)]
        try:
            ledger.job, actions = self._decide(ledger.job, entry)
        except Exception:  # one job's trouble is not the others'
            logger.exception("job %s stays as it was after %s", entry.job, entry)
            return None
        self._account(ledger, actions, entry.at)
        return actions

    @staticmethod
    def _account(ledger: Ledger, actions: Iterable[Action], at: float) -> None:
        for action in actions:
            if isinstance(action, (EndNode, OrderNode, ReleaseNode, ReassignNode, EndJob)):
                ledger.effects.append(action)
            elif isinstance(action, Note):
                ledger.note(action.text, at)


def _ends_order(entry: Entry, epoch: int) -> bool:
    """Return whether the standbys ordered with `epoch` are waited for no longer."""
    if isinstance(entry, DeadlinePassed):
        return (entry.wait, entry.epoch) == (Wait.STANDBY, epoch)
    return isinstance(entry, StandbysGone) and entry.epoch == epoch


def _may_be_requeued(ledger: Ledger) -> bool:
    ends = [effect for effect in ledger.effects if isinstance(effect, EndJob)]
    return any(end.code == REQUEUE for end in ends)


def _age(history: tuple[str, Sequence[Entry]]) -> tuple[float, int, str]:
    """Return what sorts jobs by when they came."""
    job, entries = history
    first = entries[0] if entries else None
    at = first.at if isinstance(first, Submitted) else 0.0
    return at, len(job), job
