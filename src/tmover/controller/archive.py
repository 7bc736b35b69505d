"""Journals as anybody can read them who may: beside a controller that runs, or without one.

It takes no lock and changes no file. A last line without its end may be one that is being written.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator

import msgspec

from tmover import wire
from tmover.controller import requests, status
from tmover.controller.claim import last_heard
from tmover.controller.desk import Ledger, Ledgers
from tmover.controller.journal import names
from tmover.controller.lines import OLDER, Line, Reader, damage
from tmover.controller.presence import Presence
from tmover.errors import ConfigError, JournalError, Refused


class Archive:
    """The journals of a state directory."""

    def __init__(self, state: pathlib.Path) -> None:
        """Find them. Raises `ConfigError` if there are none that this user may read."""
        self._state = state
        self._directory = state / "journal"
        if not self.is_there(state):
            msg = f"there is no journal in {state}, or none that you may read"
            raise ConfigError(msg)

    @staticmethod
    def is_there(state: pathlib.Path) -> bool:
        """Return whether a state directory has journals that this user may read."""
        return os.access(state / "journal", os.R_OK | os.X_OK)

    def jobs(self) -> list[str]:
        """Return the ids of all jobs, in the order of their numbers."""
        return names(self._directory)

    def choose(self, job: str) -> str:
        """Return the journal meant: by its name, or by Slurm's id, which means its last one.

        Raises `ConfigError` if there is none.
        """
        known = self.jobs()
        slurm = [name for name in known if name.removeprefix("slurm").partition("r")[0] == job]
        if job in known:
            return job
        if not slurm:
            listed = ", ".join(known[-5:]) or "none"
            msg = f"there is no journal of job {job} in {self._directory}; the last ones: {listed}"
            raise ConfigError(msg)
        return slurm[-1]

    def generations(self, job: str) -> list[Reader]:
        """Return the files of a job, the older one first. Raises `JournalError`."""
        path = self._directory / f"{job}.jsonl"
        present = Reader(path, job)  # first: what is replaced meanwhile becomes the older one
        try:
            older = Reader(path.with_name(path.name + OLDER), job)
        except JournalError:
            return [present]
        return [older, present]

    def lines(self, job: str) -> Iterator[Line]:
        """Yield all lines that are kept of a job, the oldest first. Raises `JournalError`."""
        with contextlib.ExitStack() as stack:
            *older, present = readers = self.generations(job)
            for reader in readers:
                stack.callback(reader.close)
            there = present.lines()
            first = next(there, None)
            for reader in older:
                for line in reader.lines():
                    if first is None or line.number >= first.number:
                        break
                    yield line
            if first is not None:
                yield first
            yield from there

    def verify(self, job: str) -> list[Reader]:
        """Read all of a job, and make it of its lines. Raises `JournalError` if it is damaged."""
        readers = self.generations(job)
        with contextlib.ExitStack() as stack:
            for reader in readers:
                stack.callback(reader.close)
            for reader in readers:
                self._fed(reader.lines(), reader.path)
        return readers

    def ledger(self, job: str, until: int | None = None) -> tuple[Ledger | None, int]:
        """Return what the job was after line `until`, or is, and the number of the last line read.

        None if it was not submitted yet. Raises `JournalError`.
        """
        path = self._directory / f"{job}.jsonl"
        source = Reader(path, job).lines() if until is None else self.lines(job)
        replay, number = self._fed(source, path, until)
        return replay.ledgers.get(job), number

    @staticmethod
    def _fed(
        lines: Iterator[Line], path: pathlib.Path, until: int | None = None
    ) -> tuple[Ledgers, int]:
        """Return what the lines make, up to that one; at least what the first does."""
        number, replay = 0, Ledgers()
        for line in lines:
            if until is not None and line.number > until and number:
                break
            try:
                replay.take_in(line.entry)
            except JournalError as error:
                raise damage(path, 1, line.entry.job, str(error)) from error
            number = line.number
        return replay, number

    def reply(self, request: wire.StatusRequest) -> tuple[wire.StatusReply, list[JournalError]]:
        """Return what a controller would, as far as the journals tell, and what is wrong with them.

        Raises `Refused` if there is no such job.
        """
        ledgers: dict[str, Ledger] = {}
        wrong: list[JournalError] = []
        for job in self.jobs():
            try:
                ledger, _ = self.ledger(job)
            except JournalError as error:
                wrong.append(error)
                continue
            if ledger is not None:
                ledgers[job] = ledger
        if request.job is not None and not ledgers and wrong:
            raise wrong[0]
        ledgers = dict(sorted(ledgers.items(), key=lambda item: item[1].since))
        shown = requests.shown(ledgers, request)
        more = 0 if request.job is not None else len(ledgers) - len(shown)
        jobs = tuple(self.status(ledgers[job]) for job in shown)
        return wire.StatusReply(jobs=jobs, more=more), wrong

    def status(self, ledger: Ledger) -> wire.JobStatus:
        """Return the job's status as it was when a controller was heard of last."""
        shown = status.of(ledger, Presence(1.0))
        return msgspec.structs.replace(shown, as_of=self._as_of(ledger))

    def ended(self, job: str) -> wire.JobStatus | None:
        """Return the status of a job that has ended, None if it has not or that cannot be told."""
        try:
            found, _ = self.ledger(self.choose(job))
        except (ConfigError, JournalError, Refused):
            return None
        shown = None if found is None else self.status(found)
        return shown if shown is not None and shown.code is not None else None

    def _as_of(self, ledger: Ledger) -> float:
        return min(time.time(), max(ledger.at, last_heard(self._directory) or 0.0))
