"""A group's jobs, one at a time and in order: in the caller where possible, else in a thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from tmover.comm.idle import IDLE


class Job(Protocol):
    """Something to be done in turn."""

    def run(self) -> None:
        """Do it. Never raises: what goes wrong is part of the outcome."""

    def is_watched(self) -> bool:
        """Return whether publishing the outcome may start other jobs."""

    def finish(self) -> None:
        """Publish the outcome. If nobody watches, the next job may run already."""


class _Waited:
    """A job whose caller waits for it though others are before it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.over = threading.Event()

    def run(self) -> None:
        self._job.run()

    def is_watched(self) -> bool:
        return self._job.is_watched()

    def finish(self) -> None:
        self._job.finish()
        self.over.set()


class Fifo:
    """The turns of one group. Its thread exists from the first job that needs it to `close`.

    What an outcome starts is done at once, before any job that waits: so the order is the same on
    every rank, whether a job was over before or after the next one was started.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._busy = False
        self._closed = False
        self._publisher = 0
        """The thread that publishes an outcome while no other job may run; 0 if none does."""
        self._thread: threading.Thread | None = None

    def run(self, job: Job) -> None:
        """Run the job after all that came before it, and return when it is finished."""
        if self._publisher == threading.get_ident():
            self._perform_within(job)
            return
        with self._changed:
            inline = not self._busy and not self._queue
            self._busy = self._busy or inline
        if inline:
            self._perform(job)
            return
        waited = _Waited(job)
        self.submit(waited)
        with IDLE.waiting():
            waited.over.wait()

    def submit(self, job: Job) -> None:
        """Let the thread run the job after all that came before it."""
        if self._publisher == threading.get_ident():
            self._perform_within(job)
            return
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._queue.append(job)
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing runs and nothing is waiting; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._queue, timeout_s)

    def close(self) -> None:
        """End the thread once nothing is left to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._busy if self._queue else self._closed and not self._busy
            )
            if not self._queue:
                return False
            job = self._queue.popleft()
            self._busy = True
        self._perform(job)
        return True

    def _perform(self, job: Job) -> None:
        watched = False
        try:
            job.run()
            watched = job.is_watched()
            if watched:
                self._publisher = threading.get_ident()
                job.finish()
        finally:
            self._publisher = 0
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        if not watched:
            job.finish()

    def _perform_within(self, job: Job) -> None:
        """Run a job in the turn of the one whose outcome has started it."""
        job.run()
        job.finish()
