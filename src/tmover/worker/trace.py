"""A worker's trace: one JSON line per thing that happened, for measuring and for post-mortems.

Written when `TMOVER_TRACE` names a directory: `DIR/<worker>.jsonl`. `t` is CLOCK_MONOTONIC in
seconds, so the lines of all processes of one machine share a clock. `tmover demo` measures pauses
and proves that no sample was lost from nothing but these lines. With `TMOVER_TRACE_STATE=1` there
is one more line per step, with a digest of each thing that the rank holds, for `tmover verify`.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import threading
import time
from typing import Any

from tmover.state import marks
from tmover.state.capture import Tracked
from tmover.state.digests import digests
from tmover.state.records import Record
from tmover.worker.identity import Identity

logger = logging.getLogger(__name__)


class Trace:
    """Appends lines; without a directory it does nothing."""

    def __init__(self, directory: str | None, identity: Identity, *, states: bool = False) -> None:
        self._states = states
        self._lock = threading.Lock()
        self._file: int | None = None
        self.identity = identity
        if directory:
            folder = pathlib.Path(directory)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / (identity.worker.replace("/", "_") + ".jsonl")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @property
    def enabled(self) -> bool:
        """Whether anybody will read what is written."""
        return self._file is not None

    def write(self, event: str, /, **fields: object) -> None:
        """Append one line. A full disk costs lines, never the job."""
        with self._lock:
            if self._file is None:
                return
            line = {
                "t": time.monotonic(),
                "event": event,
                "rank": self.identity.rank,
                "slot": self.identity.slot,
                "worker": self.identity.worker,
                **fields,
            }
            try:
                os.write(self._file, (json.dumps(line) + "\n").encode())
            except OSError:
                os.close(self._file)
                self._file = None

    def state(self, step: int, tracked: Tracked, record: bytes, *, batch: Any) -> None:
        """Append what this rank holds after `step`, as a digest by name, if that is asked for.

        The batch is there as well, as the step has left it.
        """
        if self._states and self.enabled:
            found = {**_of_batch(batch), **digests(tracked, Record.decode(record))}
            self.write("state", step=step, digests=found)

    def finished(self, step: int, tracked: Tracked, record: bytes) -> None:
        """Append what this rank holds at the end of its loop."""
        if self.enabled:
            digest = tracked.digest()
            self.write("finished", step=step, digest=digest, record=Record.digest(record))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _of_batch(batch: Any) -> dict[str, str]:
    """Return the digest of a batch by its name; nothing if there is none, or it has no digest."""
    if batch is None:
        return {}
    try:
        return {"batch": marks.digest(batch)}
    except Exception as error:  # noqa: BLE001 - whatever a stranger's object raises
        logger.debug("the batch has no digest: %s", error)
        return {}
