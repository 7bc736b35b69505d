"""Checkpoints on storage: when one is taken, and who writes what of it beside the training.

At a boundary each rank copies what it holds into host memory, as for a copy on another node, and a
thread writes that. No rank waits for another, and no collective is made: the first rank looks into
the directory until all parts are there, and then makes them a checkpoint. An attempt that a rank
dies in is never completed; the next one that is removes what there is of it. If a part cannot be
written the attempt is given up: a mark says so, and each rank removes its own part, the first one
all those that are complete. So nobody removes what another one writes.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tmover.core.events import NO_STEP
from tmover.environment import WorkerEnvironment
from tmover.errors import ConfigError, StateError
from tmover.state import shelf

if TYPE_CHECKING:
    from tmover.state.capture import Tracked
    from tmover.state.stored import Staged

logger = logging.getLogger(__name__)

UNNAMED = (
    "the job was submitted with --resume, and the script names no directory to go on from: call "
    "session.checkpoint(DIRECTORY, every=N) before session.steps()"
)
_LOOK_S = 0.1
_LAST_S = 600.0
"""How long the end of the loop waits for other ranks' parts of the last checkpoint."""


@dataclasses.dataclass(frozen=True)
class Seat:
    """What a checkpoint is taken as."""

    rank: int
    replicas: tuple[int, ...]
    """By rank, the first rank that holds the same."""
    job: str
    """The mark of the job that takes it."""
    epoch: int


@dataclasses.dataclass(frozen=True)
class _Attempt:
    step: int
    seat: Seat
    path: pathlib.Path


class Checkpoints:
    """One rank's. Does nothing until it is told a directory."""

    def __init__(self, note: Callable[[int], None] = lambda step: None) -> None:
        """`note` is called, by the first rank's thread, when the checkpoint of a step is there."""
        self._note = note
        self._changed = threading.Condition()
        self.directory: pathlib.Path | None = None
        self._every = 0
        self._keep = 0
        self._last = (NO_STEP, 0)
        """The step and epoch of the last one that was taken, or gone on from."""
        self._asked = NO_STEP
        self._copying: Staged | None = None
        self._due: tuple[_Attempt, Staged] | None = None
        """What is to be written, until it is."""
        self._open: list[_Attempt] = []
        """What has been written here, by the first rank, and not everywhere."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def to(self, directory: str | pathlib.Path, *, every: int, keep: int) -> None:
        """Take a checkpoint after every so many steps, and keep so many of them.

        Does nothing where the environment says so, as `tmover verify` has it.
        """
        if self.directory is not None:
            msg = f"session.checkpoint() was called twice; the first was for {self.directory}"
            raise ConfigError(msg)
        for name, value in (("every", every), ("keep", keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"session.checkpoint({name}={value!r}): write a whole number from 1 on"
                raise ConfigError(msg)
        if not WorkerEnvironment.read().checkpoints:
            return
        from tmover.state import stored  # noqa: F401 - takes a second, which a step should not

        self.directory = pathlib.Path(directory).absolute()
        self._every, self._keep = every, keep

    # --- the training's side ----------------------------------------------------------------------

    def gone_on_from(self, step: int) -> None:
        """Note that the training goes on after a step that is in a checkpoint."""
        self._last = (step, 0)

    def ask(self, step: int) -> None:
        """Have one taken after this step."""
        self._asked = step

    def is_due(self, step: int) -> bool:
        """Return whether one is to be taken after a step."""
        is_wanted = step == self._asked or (bool(self._every) and (step + 1) % self._every == 0)
        return self.directory is not None and step != NO_STEP and is_wanted

    def boundary(self, tracked: Tracked, *, step: int, record: bytes, seat: Seat) -> None:
        """Take one if it is due, after `step`; waits until the one before is written here."""
        last, epoch = self._last
        if not self.is_due(step) or (step == last and epoch in (0, seat.epoch)):
            return
        assert self.directory is not None
        if shelf.has(self.directory, step):
            return
        from tmover.state.stored import Staged

        self._last = (step, seat.epoch)
        with self._changed:
            self._changed.wait_for(lambda: self._due is None)
        staged = Staged(tracked, step=step, record=record, rank=seat.rank, replicas=seat.replicas)
        self._copying = staged
        path = shelf.partial(self.directory, step, f"{seat.job or 'plain'}-{seat.epoch}")
        with self._changed:
            self._due = _Attempt(step, seat, path), staged
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="tmover-checkpoints", daemon=True
            )
            self._thread.start()

    def hold_still(self) -> None:
        """Return once nothing that is copied is read any more: it may change then."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.finish()

    def finish(self, epoch: int, is_over: Callable[[], bool]) -> None:
        """Wait, at the end of the loop, until what was taken last is there, or `is_over`.

        Of what was taken before `epoch` some parts may never come.
        """
        self.hold_still()
        deadline = time.monotonic() + _LAST_S
        with self._changed:
            while self._is_awaited(epoch) and not is_over():
                if time.monotonic() > deadline:
                    logger.error("the last checkpoint did not become complete in %g s", _LAST_S)
                    return
                self._changed.wait(_LOOK_S)

    def _is_awaited(self, epoch: int) -> bool:
        return self._due is not None or any(each.seat.epoch == epoch for each in self._open)

    def close(self) -> None:
        """End the thread; what is being written is left unfinished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- beside it --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._due, self._pause_s())
                if self._closed:
                    return
                due = self._due
            if due is not None:
                self._write(*due)
                with self._changed:
                    self._due = None
                    self._changed.notify_all()
            self._complete()

    def _pause_s(self) -> float | None:
        return _LOOK_S if self._open else None

    def _write(self, attempt: _Attempt, staged: Staged) -> None:
        """Write a part; leave nothing of it if it, or another one, cannot be written."""
        path, rank = attempt.path, attempt.seat.rank
        try:
            shelf.begin(path)
            if not shelf.is_given_up(path):
                staged.write(shelf.part(path, rank))
        except Exception as error:  # noqa: BLE001 - a thread's edge: training goes on without it
            logger.error("the checkpoint of step %d was not written: %s", attempt.step, error)
            shelf.give_up(path)
            shelf.clear(path, rank)
            if rank == 0:
                shelf.clear(path)
            return
        if shelf.is_given_up(path):
            shelf.clear(path, rank)
        if rank == 0:
            with self._changed:
                self._open.append(attempt)

    def _complete(self) -> None:
        """Make what all have written checkpoints; forget what was overtaken or given up.

        Ranks write one after the other: looked at from the newest on, all before one are there too.
        """
        written = [attempt for attempt in reversed(list(self._open)) if _is_settled(attempt)]
        for attempt in reversed(written):
            is_there = self._publish(attempt)
            if not is_there:
                shelf.clear(attempt.path)
            self._forget(attempt, before=is_there)

    def _publish(self, attempt: _Attempt) -> bool:
        """Make an attempt that is written a checkpoint; return whether it is one now."""
        from tmover.state import stored

        assert self.directory is not None
        seat = attempt.seat
        try:
            if shelf.is_given_up(attempt.path):
                return False
            stored.assemble(attempt.path, step=attempt.step, job=seat.job, replicas=seat.replicas)
            self._note(attempt.step)
            shelf.prune(self.directory, self._keep)
            shelf.sweep(self.directory, until=attempt.step)
        except Exception as error:  # noqa: BLE001 - a thread's edge: training goes on without it
            logger.error("the checkpoint of step %d is lost: %s", attempt.step, error)
            shelf.give_up(attempt.path)
            return False
        return True

    def _forget(self, attempt: _Attempt, *, before: bool) -> None:
        with self._changed:
            if attempt in self._open:
                at = self._open.index(attempt)
                del self._open[0 if before else at : at + 1]
            self._changed.notify_all()


def _is_settled(attempt: _Attempt) -> bool:
    """Return whether an attempt was given up, is all written, or cannot even be looked at."""
    from tmover.state import stored

    ranks = len(attempt.seat.replicas)
    try:
        return shelf.is_given_up(attempt.path) or stored.is_written(attempt.path, ranks)
    except OSError:
        return True  # who makes a checkpoint of it says what is wrong


# --- at the start ---------------------------------------------------------------------------------


class Said(NamedTuple):
    """What a rank tells the others of what to go on from."""

    name: str = ""
    """The checkpoint that the first rank has chosen."""
    sign: str = ""
    """What the directory is known by to it."""
    refusal: str = ""
    """Why the script cannot go on with this directory."""
    damage: str = ""
    """What is wrong with the chosen checkpoint, or with all there are."""


Gather = Callable[[Said], Sequence[Said]]
"""Gives each rank what all ranks say, by rank."""
_Damaged = dict[pathlib.Path, str]
"""What is wrong with a checkpoint."""


def choose(
    directory: pathlib.Path, *, job: str, resume: bool, damaged: _Damaged | None = None
) -> shelf.Stored | None:
    """Return the checkpoint to go on from: the newest of this job; with `resume`, of any.

    A `job` without a mark has none of its own. Passes over those that are `damaged`, and adds those
    that it finds to be. Raises `ConfigError` if there are those of another job and nobody asked to
    go on from them, `StateError` if there are some and none can be read.
    """
    damaged = {} if damaged is None else damaged
    for path in shelf.complete(directory):
        if path in damaged:
            continue
        try:
            found = shelf.read(path)
        except StateError as error:
            damaged[path] = str(error)
            continue
        if not resume and not (job and found.manifest.job == job):
            msg = (
                f"{directory} holds checkpoints of another run, up to step {found.step}: go on "
                "from them with `tmover submit --resume`, or name another directory"
            )
            raise ConfigError(msg)
        return found
    if damaged:
        reason = next(iter(damaged.values()))
        msg = f"no checkpoint in {directory} can be read: {reason}; to begin anew, remove them"
        raise StateError(msg)
    if resume:
        logger.warning("%s holds no checkpoint: training begins at its first step", directory)
    return None


def agree(
    directory: pathlib.Path, *, job: str, resume: bool, rank: int, gather: Gather
) -> shelf.Stored | None:
    """Return what all ranks go on from: the newest that is whole, as all of them have found.

    The first rank chooses, all together read all files of it, and if one is damaged the one before
    is tried. Raises on all ranks what `choose` raises on the first one, and `ConfigError` if one
    does not see the same directory.
    """
    damaged: _Damaged = {}
    while True:
        heard = gather(_offer(directory, damaged, job, resume=resume) if rank == 0 else Said())
        offer, ranks = heard[0], len(heard)
        if offer.damage:
            raise StateError(offer.damage)
        if not offer.refusal:
            heard = gather(_checked(directory, offer, rank, ranks))
        if refusals := [each.refusal for each in heard if each.refusal]:
            raise ConfigError(refusals[0])
        damage = [each.damage for each in heard if each.damage]
        if not damage:
            break
        damaged[directory / offer.name] = damage[0]
    if rank == 0:
        for path, reason in damaged.items():
            logger.warning("%s; it is set aside, and the one before it is loaded", reason)
            shelf.set_aside(path)
    return shelf.read(directory / offer.name) if offer.name else None


def announce(stored: shelf.Stored, total: int) -> None:
    """Say after which step training goes on, or that all steps are done already."""
    step, path = stored.step, stored.path
    if step + 1 < total:
        logger.warning("training goes on after step %d, from %s", step, path)
    else:
        logger.warning("nothing is left to do: %s is of step %d, and total=%d", path, step, total)


def _offer(directory: pathlib.Path, damaged: _Damaged, job: str, *, resume: bool) -> Said:
    """Return what the first rank would go on from."""
    try:
        sign = _signed(directory)
        chosen = choose(directory, job=job, resume=resume, damaged=damaged)
    except ConfigError as error:
        return Said(refusal=str(error))
    except StateError as error:
        return Said(damage=str(error))
    shelf.sweep(directory)
    return Said("" if chosen is None else chosen.path.name, sign)


def _checked(directory: pathlib.Path, offer: Said, rank: int, ranks: int) -> Said:
    """Return what a rank finds of the one that was chosen, and of its share of the files."""
    from tmover.state import stored

    if shelf.signed(directory) != offer.sign:
        msg = "is another directory on another node: checkpoints need one that all nodes share"
        return Said(refusal=f"{directory} {msg}")
    try:
        if offer.name:
            stored.check(shelf.read(directory / offer.name), rank=rank, ranks=ranks)
    except StateError as error:
        return Said(damage=str(error))
    return Said()


def _signed(directory: pathlib.Path) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return shelf.sign(directory)
    except OSError as error:
        msg = f"checkpoints cannot be written to {directory}: {error.strerror or error}"
        raise ConfigError(msg) from error
