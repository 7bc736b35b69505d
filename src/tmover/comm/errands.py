"""Work in libraries that may hang: done in threads of their own, waited for only so long."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tmover.comm.latch import Bell
from tmover.comm.rendezvous import Until

T = TypeVar("T")


class _Errand(Generic[T]):
    """One piece of work. Its outcome goes to who waits, or to `late` if he has gone."""

    def __init__(self, work: Callable[[], T], late: Callable[[T], None]) -> None:
        self._work = work
        self._late = late
        self._lock = threading.Lock()
        self._given_up = False
        self.done = Bell()
        self.over = False
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            value = self._work()
        except BaseException as error:  # noqa: BLE001 - a thread's edge: who waits raises it
            with self._lock:
                self.over, self.error = True, error
            self.done.ring()
            return
        with self._lock:
            late, self.over = self._given_up, True
            self.value = None if late else value
        if late:
            self._late(value)
        self.done.ring()

    def give_up(self) -> bool:
        """Let the outcome be nobody's; return whether it is not there already."""
        with self._lock:
            self._given_up = not self.over
            return self._given_up


class Errands:
    """The threads of one process in which something may hang."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def run(
        self, name: str, work: Callable[[], T], *, until: Until, late: Callable[[T], None]
    ) -> T:
        """Return what `work` returns; raise `Interrupted` or `LinkError` if that takes too long.

        What it returns later is given to `late`, in its thread.
        """
        errand = _Errand(work, late)
        thread = self._start(name, errand.run)
        try:
            self._wait(errand.done, name, until)
        except Exception:
            if errand.give_up():
                raise
        thread.join()
        if errand.error is not None:
            raise errand.error
        return errand.value  # type: ignore[return-value] # it is over, and not late

    def send(self, name: str, work: Callable[[], object]) -> None:
        """Have something done that nobody waits for."""
        self._start(name, work)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; return whether that is so."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start(self, name: str, run: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"tmover-{name}", daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()]
            thread.start()
            self._threads.append(thread)
        return thread

    @staticmethod
    def _wait(done: Bell, name: str, until: Until) -> None:
        poller = select.poll()
        poller.register(done.fd, select.POLLIN)
        poller.register(until.latch.fd, select.POLLIN)
        ready: list[tuple[int, int]] = []
        while not any(fd == done.fd for fd, _ in ready):
            ready = poller.poll(until.check(name) * 1000 + 1)
