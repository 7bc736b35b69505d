"""What a rank records for rehearsals to be answered from, and what a standby makes of that.

A rank of the job records from its start on: what comes before the loop, and as many steps as a
standby rehearses. The first vote tells it who is of its role; the lowest rank goes on, the others
stop. A standby looks for what fits it when a rehearsal begins, and without it makes values up.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
import threading
import time
from collections.abc import Mapping, Sequence

import torch

import tmover
from tmover import config
from tmover.comm.mode import Mode
from tmover.comm.recording import Recorder
from tmover.comm.replay import Replay
from tmover.core.recorded import SETUP, Fingerprint, Recording, Tape, misfit, recorders
from tmover.errors import StateError
from tmover.state import recordings
from tmover.worker.runtime import Runtime

logger = logging.getLogger(__name__)

AUTO = "auto"
_MIB = 1 << 20
_GLANCE_S = 0.25


class Answers:
    """One worker's part in it: a rank that records, or a standby that is answered."""

    def __init__(self, runtime: Runtime) -> None:
        settings = config.load()
        self._runtime = runtime
        self._siblings = runtime.siblings
        self._place = _place(settings, runtime.identity.job)
        self._limit = settings.worker.recordings_mib * _MIB
        self._recorder: Recorder | None = None
        self._replay: Replay | None = None
        self._found: Recording | None = None
        self._refused = ""
        self._rested = False
        """Whether a rehearsal is over: the next step of one begins another, from its first step on.
        """
        self._said = ""
        """What the last rehearsal was answered from."""
        self._schema: dict[str, str] = {}
        self._steps = runtime.config.rehearse_steps
        self._first: int | None = None
        self._committed: set[int] = set()
        identity = runtime.identity
        if identity.sandbox:
            near = self._siblings if identity.nproc > 1 else None
            self._replay = runtime.fabric.rehearsal = Replay(near, nproc=identity.nproc)
            self.begin_again()
        elif self._place is not None and identity.nnodes > 1:
            self._recorder = Recorder(runtime.fabric, nproc=identity.nproc, limit=self._limit)
            self._recorder.start()

    # --- what the engine tells --------------------------------------------------------------------

    def begin(self, schema: Mapping[str, str], total: int) -> bytes:
        """Take note that a loop of `total` steps was entered; return a digest of the role."""
        self._schema = dict(schema)
        self._steps = min(self._steps, total)
        if self._replay is not None:
            if self._found is None:
                self._look()
            elif why := misfit(self._found.fingerprint, self._fingerprint()):
                self._refuse(why)
        return hashlib.sha256(repr(sorted(self._schema.items())).encode()).digest()[:16]

    def open(self, index: int) -> None:
        """Take note that an attempt of a step begins."""
        if self._recorder is not None and self._runtime.fabric.mode is Mode.LIVE:
            self._first = index if self._first is None else self._first
            step = index - self._first
            self._recorder.begin(step if step < self._steps else None)
        elif self._replay is not None and self._runtime.fabric.witness is None:
            if self._rested:
                self._begin_round()
            self._replay.begin(index)

    def committed(self, index: int, roles: Sequence[bytes]) -> None:
        """Take note that a step was applied by all; `roles` are those of all ranks, if known."""
        recorder, first = self._recorder, self._first
        if recorder is None or first is None:
            return
        by_rank = recorders(roles)
        own = self._runtime.identity.rank
        if not by_rank or by_rank[own] != own:
            self._stop()
            return
        self._committed.add(index - first)
        if len(self._committed) < self._steps:
            recorder.begin(None)
            return
        ranks = tuple(rank for rank, by in enumerate(by_rank) if by == own)
        self._stop()
        writing = threading.Thread(
            target=self._write,
            args=(recorder.tape(), ranks, len(set(by_rank))),
            name="tmover-recording",
            daemon=True,
        )
        writing.start()

    def begin_again(self) -> None:
        """Begin a rehearsal from before the loop: with a recording, if there is one by now."""
        if self._replay is None:
            return
        self._schema = {}
        self._begin_round()
        self._replay.begin(SETUP)

    def _begin_round(self) -> None:
        """Speak to the siblings anew, and look again for a recording."""
        self._siblings.begin(self._runtime.fabric.rank // self._runtime.identity.nproc)
        self._refused, self._found, self._rested = "", None, False
        if self._replay is not None:
            self._replay.load({}, 0)
        self._look()

    def recorded(self) -> str:
        """Say what a rehearsal that is over was answered from, and let go of the recording."""
        if self._replay is None or self._rested:
            return self._said
        replay, found = self._replay, self._found
        said = f"made-up values: {self._refused or self._missing()}"
        if found is not None:
            said = f"recorded values of rank {found.rank}"
            if replay.invented:
                total = replay.invented + replay.replayed
                why = replay.why or "the rest was left out for its size"
                said += f", {replay.invented} of {total} made up: {why}"
        if self._siblings.spoke or self._siblings.trouble:
            trouble = self._siblings.trouble
            said += f"; inside the node made up: {trouble}" if trouble else "; inside the node real"
        self._found, self._rested, self._said = None, True, said
        replay.load({}, 0)
        return said

    def end(self) -> None:
        """Take note that this process is a rank of the job from now on."""
        if self._replay is not None:
            self._siblings.close()
            self._replay = self._runtime.fabric.rehearsal = None
            self._said = ""

    # --- a standby's ------------------------------------------------------------------------------

    def _fingerprint(self) -> Fingerprint:
        identity = self._runtime.identity
        return Fingerprint(
            tmover=tmover.__version__,
            torch=str(torch.__version__),
            nnodes=identity.nnodes,
            nproc=identity.nproc,
            schema=self._schema,
        )

    def _look(self) -> None:
        """Answer from the recording of this rank's role, if it is there and of use."""
        place, replay = self._place, self._replay
        if place is None or replay is None:
            return
        try:
            found = recordings.find(place, self._runtime.fabric.rank)
            if found is None:
                return
            if why := misfit(found.fingerprint, self._fingerprint()):
                self._refuse(why)
                return
            replay.load(recordings.read(place, found), found.steps)
        except (StateError, OSError) as error:
            self._refuse(str(error))
            return
        self._found, self._refused = found, ""

    def _refuse(self, why: str) -> None:
        self._found, self._refused = None, f"the recording is not used: {why}"
        logger.warning("%s", self._refused)
        if self._replay is not None:
            self._replay.load({}, 0)

    def _missing(self) -> str:
        if self._place is None:
            return "worker.recordings is not set"
        return f"there was no recording in {self._place} yet"

    # --- a rank's ---------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None

    def _write(self, tape: Tape, ranks: tuple[int, ...], count: int) -> None:
        """Write what was recorded, beside the training (a thread of its own)."""
        place = self._place
        assert place is not None
        recording = Recording(
            fingerprint=self._fingerprint(),
            rank=ranks[0],
            ranks=ranks,
            steps=self._steps,
        )
        try:
            written = recordings.save(place, recording, tape, limit=self._limit // count)
        except (OSError, StateError) as error:
            logger.warning("standbys will rehearse with made-up values: %s", error)
            return
        calls = len(written.answers)
        self._runtime.trace.write("recorded", ranks=list(ranks), calls=calls, path=str(place))
        recordings.prune(place.parent, place)


def await_recording(runtime: Runtime, error: str) -> None:
    """Wait, after a rehearsal that failed on made-up values, until there are recorded ones.

    The workers are then started afresh, as after every failure of theirs; after a few the node is
    no standby any more. Without this they could all happen before the job has done its first steps.
    """
    settings, rehearsal, standing = config.load(), runtime.fabric.rehearsal, runtime.standing
    place = _place(settings, runtime.identity.job)
    if place is None or not isinstance(rehearsal, Replay) or rehearsal.has_recording:
        return
    logger.warning("rehearsed with made-up values, awaits recorded ones after: %s", error)
    deadline = time.monotonic() + settings.worker.recording_s
    while time.monotonic() < deadline and not _is_there(place, runtime.fabric.rank):
        if standing.wait(lambda: standing.stop is not None, timeout_s=_GLANCE_S):
            return


def _is_there(place: pathlib.Path, rank: int) -> bool:
    """Return whether a recording is there, or never will be."""
    try:
        return recordings.find(place, rank) is not None
    except (StateError, OSError) as error:
        logger.warning("%s", error)
        return True


def _place(settings: config.Config, job: str) -> pathlib.Path | None:
    """Return where this job's recordings are; None if there are to be none."""
    root = settings.worker.recordings
    if not root:
        return None
    if root == AUTO:
        return config.state_directory(configuration=settings) / "recordings" / job
    return pathlib.Path(root).absolute() / job
