"""What the controller has heard, on disk before it is acted on.

One file per job, one JSON object per line (`lines`). Feeding the entries to `decide` in order
yields the job as it was. Lines are only ever added, until there are many: then the whole file is
replaced by a snapshot, and kept as one older generation. A last line without its end was never
acted on, and is dropped. Any other damage is refused: a decision that was sent must not be taken
back, and half a journal would do that.
"""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Sequence

from tmover.controller.claim import Claim
from tmover.controller.disk import Disk
from tmover.controller.jobfile import JobFile
from tmover.controller.keys import private_directory
from tmover.controller.lines import Entry, Kept, Reader, Settled, Snapshot, damage
from tmover.errors import JournalError

__all__ = ["Entry", "Journal", "Kept", "Settled", "Snapshot", "names"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9]+|slurm[0-9]+(?:r[0-9]+)?")
"""A job's: a number of ours, or Slurm's id and restart count."""


def names(directory: pathlib.Path) -> list[str]:
    """Return the ids of all jobs that have a journal there, in the order of their numbers."""
    found = (path.stem for path in directory.glob("*.jsonl") if _NAME.fullmatch(path.stem))
    return sorted(found, key=lambda name: [int(n) for n in re.findall("[0-9]+", name)])


class Journal:
    """The journals of all jobs of one controller. Only one process can hold them."""

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        lines: int = 10_000,
        size: int = 4 * 2**20,
        claim_s: float = 10.0,
        disk: Disk | None = None,
    ) -> None:
        """Take the journals in `directory`, made if missing.

        One that has grown by more than so many lines and bytes is too long. Raises `ConfigError` if
        another controller has them.
        """
        self._directory = private_directory(directory)
        self._most = (lines, size)
        self._disk = disk or Disk()
        self._files: dict[str, JobFile] = {}
        self._claim = Claim(self._directory, self._disk, claim_s)

    def jobs(self) -> list[str]:
        """Return the ids of all jobs, in the order of their numbers."""
        return names(self._directory)

    def next_id(self) -> str:
        """Return an id that no job here ever had, one whose journal was moved away included."""
        found = (re.match(r"(\d+)\.jsonl", path.name) for path in self._directory.iterdir())
        return str(max((int(match[1]) for match in found if match), default=0) + 1)

    def replay(self, job: str) -> list[Kept]:
        """Return the job's entries, and make its journal ready to go on.

        Raises `JournalError` naming the line that is damaged and the way out.
        """
        self._claim.confirm_if_due()
        if job in self._files:
            self._files[job].close()
        read = Reader(self._path(job), job)
        entries = [line.entry for line in read.lines()]
        if read.is_torn:
            logger.warning("dropped the torn last line %s of %s", read.place + 1, read.path)
        file = self._files[job] = JobFile(read.path, self._disk, self._claim, read)
        if self._claim.is_taken_over:
            file.take_over()
        return entries

    def append(self, job: str, entries: Sequence[Entry]) -> None:
        """Have the entries on disk before returning.

        Raises `JournalError` if they are not; then none of them is in the journal. Raises
        `Superseded` if another controller has taken the journals over.
        """
        self._file(job).append(entries)

    def is_long(self, job: str, *, times: int = 1) -> bool:
        """Return whether a snapshot should take the place of the job's lines."""
        file, (most, most_bytes) = self._file(job), self._most
        lines, size = file.grown
        return lines > times * most and size > times * max(most_bytes, file.base)

    def grown(self, job: str) -> int:
        """Return how many lines were added since the last snapshot."""
        return self._file(job).grown[0]

    def replace(self, job: str, snapshot: Snapshot) -> None:
        """Have the snapshot take the place of all of the job's lines. Raises as `append` does."""
        self._file(job).replace(snapshot)

    def unreadable(self, job: str, error: JournalError) -> JournalError:
        """Return the error of a snapshot that is whole, but makes no job here."""
        return damage(self._path(job), 1, job, str(error))

    def renew(self) -> None:
        """Have other controllers see that this one lives. Raises as `append` does."""
        self._claim.renew()

    def close(self) -> None:
        """Let another controller have the journals."""
        for file in self._files.values():
            file.close()
        self._claim.release()

    def _file(self, job: str) -> JobFile:
        if job not in self._files:
            self._files[job] = JobFile(self._path(job), self._disk, self._claim, None)
        return self._files[job]

    def _path(self, job: str) -> pathlib.Path:
        return self._directory / f"{job}.jsonl"
