"""What torch holds while a collective runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from tmover.comm.idle import IDLE
from tmover.comm.untraced import untraced
from tmover.errors import LinkError


@untraced
class Work(dist.Work):
    """A collective that is under way, or done.

    C++ forwards only `wait` and `get_future`. The future never carries an error: the reducer of DDP
    cannot read one, and crashes.
    """

    def __init__(
        self,
        result: Any,
        job: Callable[[], Exception | None] | None = None,
        *,
        pending: bool = False,
    ) -> None:
        super().__init__()
        self._result = result
        self._job = job
        self._lock = threading.Lock()
        self._done = job is None and not pending
        self._over: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._asked: torch.futures.Future[Any] | None = None
        """The future, if somebody had asked for it before the collective was done."""
        self._is_promised = False
        """Whether a backward waits for the future."""
        self._error: Exception | None = None

    # --- as a job of the group --------------------------------------------------------------------

    def run(self) -> None:
        """Carry the collective out."""
        job, self._job = self._job, None
        self._error = job() if job is not None else None
        self._end()

    def _end(self) -> None:
        with self._lock:
            if not self._done:
                self._done, self._asked = True, self._future

    def is_watched(self) -> bool:
        """Return whether somebody may go on from the future once it has its result."""
        return self._asked is not None

    def finish(self) -> None:
        """Let everybody know."""
        self._wake()
        self.publish()

    def _wake(self) -> None:
        """Let who waits go on."""
        self._end()
        if self._over is not None:
            self._over.set()

    def publish(self) -> None:
        """Give the future its result; what was to follow happens now, in this thread."""
        if self._asked is not None:
            if self._is_promised:
                IDLE.keep()
            self._asked.set_result(self._result)

    # --- as torch sees it -------------------------------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when it is done. Raises what went wrong, unless nobody will use the result."""
        with self._lock:
            if not self._done and self._over is None:
                self._over = threading.Event()
            over = None if self._done else self._over
        if over is not None and not _is_set(over, timeout.total_seconds() or None):
            msg = f"a collective was not done within {timeout.total_seconds():g} s"
            raise LinkError(msg)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result: a list of tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = future
            done = self._done
            self._is_promised = not done and IDLE.promise()
        if done:
            future.set_result(self._result)
        return future

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._done

    def is_success(self) -> bool:
        """Return whether it is done and nothing went wrong."""
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        """Return what went wrong."""
        return self._error

    def result(self) -> Any:
        """Return the tensors."""
        return self._result

    def synchronize(self) -> None:
        """Wait, as there is no stream to order after."""
        self.wait()


def _is_set(over: threading.Event, timeout_s: float | None) -> bool:
    with IDLE.waiting():
        return over.wait(timeout_s)
