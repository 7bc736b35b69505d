"""The one place where a rank's `core.rank.Rank` changes, whichever thread learned of the change.

The main thread votes and passes barriers, the control thread hears orders, a communication thread
sees a link break: all of them come here, and one lock makes the outcome of a vote and a revocation
exclude each other. What is decided is stated in `core.rank`; this file adds the lock, the waiting
and the messages that follow from a change.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tmover.core import rank as rules
from tmover.core.events import Broken, FromAgent, Plan, Reported, Stepped
from tmover.core.orders import Assign, Start, Stop, Welcome
from tmover.core.rank import Rank, Resolution, Verdict, Vote

Send = Callable[[FromAgent], None]


def _no_copies() -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    return (), {}


class Standing:
    """A rank's standing, its pending orders, and the condition to wait for a change of either."""

    def __init__(
        self,
        *,
        job: str,
        worker: str,
        send: Send,
        usable: bool,
        copies: Callable[[], tuple[tuple[int, ...], dict[int, tuple[int, ...]]]] = _no_copies,
    ) -> None:
        """Begin. `copies`: the steps of this rank's copies, and of those it keeps, by rank."""
        self._copies = copies
        self._job = job
        self._worker = worker
        self._send = send
        self.changed = threading.Condition(threading.RLock())
        self.rank = Rank() if usable else Rank(step=None)
        self.world: Plan | None = None
        """The plan of the world this rank trains in."""
        self._is_first = False
        """Whether no vote has passed in a world that this rank has switched to."""
        self.start: Start | None = None
        self.assign: Assign | None = None
        self.stop: Stop | None = None
        self.welcome: Welcome | None = None
        """The last word on who this process is to be, since it was told first."""
        self.released = 0
        """The highest epoch whose switch every rank has reported passed."""
        self.at_safe_point = False
        """Whether the main thread waits, outside of every attempt, and reports for itself."""
        self._heard_at = time.monotonic()
        self._owed: set[int] = set()
        """Revoked epochs that the controller has asked about and that are not answered yet."""
        self._answered: set[int] = set()

    # --- waiting ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock, and wake whoever waits for a change."""
        with self.changed:
            yield
            self.changed.notify_all()

    def wait(self, due: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `due()` holds or the time is over; return whether it holds."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not due():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(left)
            return True

    def hear(self) -> None:
        """Note that the controller is there: it has said something, or answers the agent."""
        with self.changing():
            self._heard_at = time.monotonic()

    def wait_until_heard(self, *, after: float, timeout_s: float) -> bool:
        """Wait until the agent has said something after a time; return whether it has."""
        return self.wait(lambda: self._heard_at > after, timeout_s=timeout_s)

    def wait_for_order(self, due: Callable[[], bool], *, silent_s: float) -> bool:
        """Wait until `due()` holds; return False once no controller was heard of for `silent_s`."""
        with self.changed:
            began = time.monotonic()
            while not due():
                left = max(began, self._heard_at) + silent_s - time.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(left)
            return True

    # --- votes and barriers -----------------------------------------------------------------------

    def cast(self, step: int, *, good: bool) -> tuple[Vote, bool]:
        """Vote on `step`; the second value says whether the epoch is revoked already."""
        with self.changing():
            self.rank, vote = rules.cast(self.rank, step, good=good)
            return vote, self.rank.interrupted

    def tally(self, votes: Sequence[Vote]) -> tuple[Verdict, int]:
        """Count the votes of all ranks; return the verdict and the epoch to switch to."""
        with self.changing():
            self.rank, verdict, switch = rules.tally(self.rank, votes)
            world, is_first = self.world, self._is_first and verdict is Verdict.PASSED
            self._is_first = self._is_first and not is_first
        if is_first and world is not None and world.rank_of(self._worker) == 0:
            epoch, step = world.epoch, votes[0].step
            self._send(Stepped(job=self._job, worker=self._worker, epoch=epoch, step=step))
        return verdict, switch

    def ask(self) -> None:
        """Vote for a checkpoint until one is agreed on."""
        with self.changing():
            self.rank = rules.ask(self.rank)

    def enter(self, epoch: int) -> bool:
        """Stand in the commit barrier of `epoch`; False if that epoch is over."""
        with self.changing():
            self.rank = rules.enter(self.rank, epoch)
            return self.rank.entered == epoch

    def leave(self, plan: Plan) -> Verdict:
        """Every member's barrier message has come: pass, unless the epoch was revoked first."""
        with self.changing():
            self.rank, verdict = rules.leave(self.rank, plan.epoch)
            if verdict is Verdict.PASSED:
                self.world, self._is_first = plan, True
                self._owed.clear()
                self._answered.clear()
            return verdict

    def arm(self, epoch: int) -> None:
        """Vote for `epoch` from now on."""
        with self.changing():
            self.rank = rules.arm(self.rank, epoch)

    def abort(self, epoch: int) -> bool:
        """Go back to the world before; False if this rank is in doubt about `epoch`."""
        with self.changing():
            self.rank = rules.abort(self.rank, epoch)
            return self.rank.entered != epoch

    def applied(self, step: int) -> None:
        """Stand at `step` from now on."""
        with self.changing():
            self.rank = rules.applied(self.rank, step)

    def resumed(self, step: int) -> None:
        """Begin after `step`, with the state of a checkpoint on storage."""
        with self.changing():
            self.rank = rules.resume(self.rank, step)

    def resolve(self, step: int) -> Resolution:
        """Return what this rank does to stand at `step`."""
        with self.changed:
            return rules.resolve(self.rank, step)

    # --- revocation -------------------------------------------------------------------------------

    def revoke(self, epoch: int) -> None:
        """Nothing of `epoch` passes here any more."""
        with self.changing():
            self.rank = rules.revoke(self.rank, epoch)

    def accuse(self, epoch: int, peers: tuple[str, ...], reason: str) -> None:
        """Revoke `epoch` and tell the controller whose links broke."""
        self.revoke(epoch)
        if peers:
            self._send(
                Broken(job=self._job, worker=self._worker, epoch=epoch, peers=peers, reason=reason)
            )

    def asked(self, epoch: int) -> None:
        """Note that the controller wants a report on `epoch`."""
        with self.changing():
            self._owed.add(epoch)
            self._answered.discard(epoch)

    def report(self, *epochs: int) -> None:
        """Report on `epochs` and on whatever was asked. The caller passes no vote or barrier now.

        An epoch is reported on once, unless the controller asks again.
        """
        with self.changed:
            due = (self._owed | {e for e in epochs if e > 0}) - self._answered
            self._owed.clear()
            self._answered |= due
            now = self.rank
        own, kept = self._copies() if due else _no_copies()
        for epoch in sorted(due):
            self._send(
                Reported(
                    job=self._job,
                    worker=self._worker,
                    of=epoch,
                    epoch=now.epoch,
                    step=now.step,
                    doubt=now.doubt,
                    own=own,
                    kept=kept,
                )
            )

    def owes_report(self) -> bool:
        """Return whether the controller asked for a report that was not sent yet."""
        with self.changed:
            return bool(self._owed - self._answered)

    def next_assign(self, after: int) -> Assign | None:
        """Return the assignment that has come for an epoch beyond `after`, unless it is over."""
        with self.changed:
            order = self.assign
            if order is None or order.plan.epoch <= after:
                return None
            return None if order.plan.epoch in self.rank.revoked else order

    def told(self, welcome: Welcome) -> None:
        """Take note of who this process is to be."""
        with self.changing():
            self.welcome = welcome

    def next_cast(self, after: int) -> Welcome | None:
        """Return the order to run the script again that has come since the cast `after`.

        Another job's is one, too.
        """
        with self.changed:
            order = self.welcome
            is_known = order is None or (order.job == self._job and order.cast <= after)
            return None if is_known else order

    def raise_if_stopped(self) -> None:
        """Raise `SystemExit` if the controller has ended this process's part in the job."""
        with self.changed:
            if self.stop is not None:
                raise SystemExit(self.stop.code)
