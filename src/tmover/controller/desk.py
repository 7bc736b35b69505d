"""The jobs, and their journal: the one place where a job changes.

`write` puts entries into the journal, `take_in` applies one of them. At a start the same `take_in`
is fed from the journal, so what a restarted controller knows is what the one before knew: the jobs,
and what the scheduler still owes them. `tidy` has snapshots take the place of long journals.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from tmover.controller import lines
from tmover.controller.journal import Entry, Journal, Kept, Settled, Snapshot
from tmover.core import snapshot
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
from tmover.core.remains import remains
from tmover.errors import JournalError

logger = logging.getLogger(__name__)

NOTES_KEPT = 20
_CALM = frozenset({Stage.TRAINING, Stage.WAITING, Stage.ENDED})
"""In these a snapshot of a large job, which takes a moment, keeps nobody waiting."""
_FAR_TOO_LONG = 8
"""A journal that is so many times too long is replaced whatever its job does."""
_ENDED_LINES = 100
"""A job that has ended keeps no more lines than that."""
Decide = Callable[[Job, AnyEvent], tuple[Job, list[Action]]]


class Ledger:
    """One job, and what is under way for it outside of `decide`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.notes: collections.deque[str] = collections.deque(maxlen=NOTES_KEPT)
        self.effects: list[Errand] = []
        """What the scheduler was asked and has not yet done."""
        self.since = 0.0
        """When the job was submitted, and when it was heard of last."""
        self.at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and nothing is owed to it."""
        return self.job.phase.stage is Stage.ENDED and not self.effects

    def note(self, text: str, at: float) -> None:
        """Keep a sentence for people."""
        self.notes.append(f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}")

    def snapshot(self) -> Snapshot:
        """Return all of it as one line of the journal."""
        return Snapshot(
            job=self.job.name,
            state=snapshot.save(self.job),
            effects=tuple(self.effects),
            notes=tuple(self.notes),
            since=self.since,
            at=self.at,
        )

    @classmethod
    def restored(cls, kept: Snapshot) -> Ledger:
        """Return what the snapshot is of. Raises `JournalError` if it cannot be read."""
        ledger = cls(snapshot.restore(kept.state))
        ledger.effects += kept.effects
        ledger.notes += kept.notes
        ledger.since, ledger.at = kept.since, kept.at
        return ledger


class Ledgers:
    """Jobs, as entries of their journals make them."""

    def __init__(self, decide: Decide = decide) -> None:
        self._decide = decide
        self.ledgers: dict[str, Ledger] = {}

    def take_in(self, entry: Kept) -> list[Action] | None:
        """Apply an entry of the journal; return what is to be done, as far as `decide` said.

        None if it could say nothing: then the job stays as it was, here and after a restart. Raises
        `JournalError` if it is a snapshot that cannot be read.
        """
        if isinstance(entry, Snapshot):
            self.ledgers[entry.job] = Ledger.restored(entry)
            return []
        ledger = self.ledgers.get(entry.job)
        if isinstance(entry, Submitted) and ledger is None:
            ledger = self.ledgers[entry.job] = Ledger(Job(name=entry.job))
            ledger.since = entry.at
        if ledger is None:
            return []
        actions = self._apply(ledger, entry)
        ledger.at = entry.at
        if ledger.is_over:
            ledger.job = remains(ledger.job)
        return actions

    def _apply(self, ledger: Ledger, entry: Entry) -> list[Action] | None:
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
            what = type(entry).__name__
            ledger.note(
                f"an error of the controller: {what} is not acted on, see its log", entry.at
            )
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


class Desk(Ledgers):
    """All jobs of this controller."""

    def __init__(self, journal: Journal, decide: Decide = decide) -> None:
        """Take over what is in the journal. Raises `JournalError`."""
        super().__init__(decide)
        self._journal = journal
        self._changed: dict[str, None] = {}
        """Jobs whose journal may have become too long."""
        self._put_off: dict[str, int] = {}
        """By how many lines a journal must have grown until it is tried again to replace it."""
        for job in journal.jobs():
            self._take_up(job)
        self._sort()
        self._next = int(journal.next_id())

    def _take_up(self, job: str) -> None:
        entries = self._journal.replay(job)
        try:
            for entry in entries:
                self.take_in(entry)
        except JournalError as error:
            raise self._journal.unreadable(job, error) from error
        logger.info("replayed %s entries of job %s", len(entries), job, extra={"job_id": job})

    def _sort(self) -> None:
        """Have the oldest job first."""
        jobs = sorted(self.ledgers.items(), key=lambda item: _age(*item))
        self.ledgers.clear()
        self.ledgers.update(jobs)

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

    def take_in(self, entry: Kept) -> list[Action] | None:
        """As `Ledgers.take_in` does; and look at the job's journal when there is time."""
        self._changed[entry.job] = None
        return super().take_in(entry)

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

    def tidy(self) -> None:
        """Have a snapshot take the place of the journal of one job, if that is too long.

        For when nothing else is to be done. Raises `Superseded` if the journals are not ours.
        """
        while self._changed:
            job, _ = self._changed.popitem()
            if self._is_due(job):
                self._replace(job)
                return

    def _is_due(self, job: str) -> bool:
        ledger = self.ledgers.get(job)
        if ledger is None:
            return False
        grown = self._journal.grown(job)
        if grown < self._put_off.get(job, 0):
            return False
        if ledger.is_over and grown > _ENDED_LINES:
            return True
        is_calm = ledger.job.phase.stage in _CALM
        return self._journal.is_long(job, times=1 if is_calm else _FAR_TOO_LONG)

    def _replace(self, job: str) -> None:
        """Replace a job's journal, if what is to take its place can be read back."""
        ledger = self.ledgers[job]
        try:
            kept = ledger.snapshot()
            again = lines.read(lines.write(1, kept), job, None).entry
            if not isinstance(again, Snapshot) or Ledger.restored(again).job != ledger.job:
                msg = "what would be written is not what was"
                raise JournalError(msg)
            self._journal.replace(job, kept)
        except (JournalError, ValueError) as error:
            self._put_off[job] = 2 * self._journal.grown(job)
            logger.warning("the journal of job %s stays as long as it is: %s", job, error)
        else:
            self._put_off.pop(job, None)
            logger.info("replaced the journal of job %s by a snapshot", job, extra={"job_id": job})


def _ends_order(entry: Entry, epoch: int) -> bool:
    """Return whether the standbys ordered with `epoch` are waited for no longer."""
    if isinstance(entry, DeadlinePassed):
        return (entry.wait, entry.epoch) == (Wait.STANDBY, epoch)
    return isinstance(entry, StandbysGone) and entry.epoch == epoch


def _may_be_requeued(ledger: Ledger) -> bool:
    ends = [effect for effect in ledger.effects if isinstance(effect, EndJob)]
    return any(end.code == REQUEUE for end in ends)


def _age(name: str, ledger: Ledger) -> tuple[float, int, str]:
    """Return what sorts jobs by when they came."""
    return ledger.since, len(name), name
