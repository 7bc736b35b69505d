"""Send and receive between two ranks of a group, with tags, in any order.

Whoever waits for a message moves all of its group; where nobody waits, a thread of the group does,
so that two ranks that both send first do not wait for each other. A sender dials a link of its own
to each receiver: neither has to wait until the other one thinks of it.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import torch

from tmover.comm.idle import IDLE
from tmover.comm.inbox import ANY, Message
from tmover.comm.latch import Bell
from tmover.comm.routes import Routes
from tmover.comm.wiring import Wiring
from tmover.errors import Interrupted, LinkError

_GRACE_S = 0.002
"""The thread leaves messages for so long to those who may be about to wait for them."""
_ACTIVE_S = 0.1
"""It looks after them that often until there have been none for so long."""
_GLANCES = 200
"""Who waits looks so often before it sleeps: to be woken costs more than most messages take."""


class Ground(Protocol):
    """Where messages are sent from: the fabric, or what a standby's rehearsal has for one."""

    attempt_open: bool
    """Whether a message that is given up is answered with what nobody keeps."""
    fault: Exception | None
    """What went wrong where nobody could be told."""

    @property
    def wiring(self) -> Wiring:
        """All sockets of this process."""

    def observe(self, epoch: int, peers: tuple[str, ...], reason: str) -> None:
        """Take note that links broke."""

    def revoke(self, epoch: int, reason: str) -> None:
        """Take note that an epoch is over."""


class Post:
    """The messages of one group. Private methods below `_turn` are called by whoever drives."""

    def __init__(self, fabric: Ground, name: str, ranks: tuple[int, ...]) -> None:
        self._fabric = fabric
        self._name = name
        self._ranks = ranks
        self._bell = Bell()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._needed = threading.Condition(self._lock)
        """Wakes the thread alone: woken for every message it would get in the way of who sends."""
        self._posted: deque[Message] = deque()
        self._open = 0
        self._driven = False
        """Whether somebody drives."""
        self._waiters = 0
        """How many want to drive."""
        self._turns = 0
        self._active = 0.0
        """When a message was last under way."""
        self._idle = True
        """Whether the thread sleeps until it is told."""
        self._watched: deque[Message] = deque()
        """What is done, and what somebody wants to go on from: he may wait for other messages."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._routes: Routes | None = None

    def post(self, message: Message) -> Message:
        """Send or receive a message: as far as it goes now, the rest when somebody drives."""
        message.drive, message.watched = self.drive, self._watched.append
        if message.peer != ANY:
            message.other = message.world.peers.get(self._ranks[message.peer])
        with self._lock:
            self._posted.append(message)
            self._open += 1
            if self._thread is None and not self._closed:
                self._fabric.wiring.on_message_link(self._name, self._bell.ring)
                self._thread = threading.Thread(
                    target=self._serve, name=f"tmover-post-{self._name}", daemon=True
                )
                self._thread.start()
            free = not self._driven
            self._driven = True
        if not free:
            self._bell.ring()
            return message
        try:
            self._turn()
        finally:
            self._leave()
        return message

    def drive(self, message: Message, timeout_s: float | None) -> bool:
        """Move messages until this one is done; return whether it is before the time is up."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not message.is_completed():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._enter_turn(message.is_completed, min(left, threading.TIMEOUT_MAX)):
                try:
                    while not message.is_completed() and time.monotonic() < deadline:
                        self._turn(late=self._wait(deadline, glances=_GLANCES))
                finally:
                    self._leave()
        return True

    def settle(self, timeout_s: float) -> bool:
        """Wait until no message is under way; return whether that is so."""
        with self._lock:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def stray(self, ended: Collection[int]) -> str:
        """Return a message under way of which no end is with any but these ranks, "" if none."""
        if not self._enter_turn(lambda: False, _GRACE_S):
            return ""
        try:
            for message in self._routes.under_way() if self._routes is not None else ():
                ends = self._ranks if message.peer == ANY else (self._ranks[message.peer],)
                if all(rank in ended for rank in ends):
                    return str(message)
        finally:
            self._leave()
        return ""

    def close(self) -> None:
        """Give up what is under way, and end the thread: it is the last who drives."""
        self._fabric.wiring.off_message_link(self._name)
        with self._lock:
            self._closed = True
            self._needed.notify()
        self._bell.ring()
        if self._thread is not threading.current_thread():  # or a callback closes the group
            if self._thread is not None:
                self._thread.join()
            self._bell.close()

    # --- who drives -------------------------------------------------------------------------------

    def _enter_turn(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Become who drives, unless this is done first or the time is up."""
        with self._lock:
            self._waiters += 1
            if self._driven:
                self._bell.ring()
            with IDLE.waiting():
                self._changed.wait_for(lambda: done() or not self._driven, timeout_s)
            self._waiters -= 1
            if self._driven or done():
                return False
            self._driven = True
            return True

    def _leave(self) -> None:
        with self._lock:
            self._driven = False
            if self._waiters:
                self._changed.notify_all()
            if self._idle and (self._open or self._closed):
                self._needed.notify()

    def _serve(self) -> None:
        """Drive when nobody else has for a while, and publish what others go on from."""
        over = False
        while True:
            while self._watched:
                self._watched.popleft().publish()
            if over:
                return
            if not self._stand_by():
                continue
            try:
                late = False
                while self._turn(late=late) and self._open and not self._is_wanted():
                    late = self._wait(math.inf)
            finally:
                self._leave()
            over = self._closed

    def _is_wanted(self) -> bool:
        """Return whether the thread is not to go on driving."""
        return bool(self._waiters or self._watched)

    def _stand_by(self) -> bool:
        """Wait until the thread may be wanted; return whether it drives now."""
        with self._lock:
            if self._open:
                self._active = time.monotonic()
            elif time.monotonic() - self._active > _ACTIVE_S:
                self._sleep_until(lambda: self._open > 0)
            turns = self._turns
            self._needed.wait_for(lambda: self._closed or bool(self._watched), _GRACE_S)
            if self._driven and self._turns == turns:  # who drives waits: he tells when he leaves
                self._sleep_until(lambda: not self._driven)
            elif not self._driven and not self._watched:
                self._driven = self._closed or (self._open > 0 and self._turns == turns)
                return self._driven
            return False

    def _sleep_until(self, ready: Callable[[], bool]) -> None:
        """Wait for this, for something to publish, or the end. The lock is held."""
        self._idle = True
        self._needed.wait_for(
            lambda: ready() or bool(self._watched) or (self._closed and not self._driven)
        )
        self._idle = False

    # --- a turn -----------------------------------------------------------------------------------

    def _turn(self, *, late: bool = False) -> bool:
        """Move everything as far as it goes without waiting. Return False once it is closed.

        `late`: nothing has come in the time that some message has.
        """
        self._bell.clear()
        with self._lock:
            posted, self._posted = self._posted, deque()
            closed = self._closed
        try:
            for message in posted:
                self._take_on(message)
            if self._routes is not None:
                if late:
                    self._routes.look_for_late(time.monotonic())
                self._routes.advance()
        except Exception as error:  # noqa: BLE001 - who drives may be another: `exchange` raises it
            self._tell(error)
            self._give_up(str(error) or repr(error), also=posted)
        if closed:
            self._give_up("the group is closed", also=posted)
        self._count()
        return not closed

    def _tell(self, error: Exception) -> None:
        """Let the world know what has gone wrong with a message."""
        if isinstance(error, LinkError):
            self._fabric.observe(self._epoch(), error.peers, str(error))
        elif isinstance(error, Interrupted):
            self._fabric.revoke(self._epoch(), str(error))
        else:
            self._fabric.fault = error

    def _epoch(self) -> int:
        return self._routes.world.epoch if self._routes is not None else 0

    def _count(self) -> None:
        under_way = len(self._routes) if self._routes is not None else 0
        with self._lock:
            self._turns += 1
            self._open = under_way + len(self._posted)
            if self._waiters or not self._open:
                self._changed.notify_all()
            if self._watched:
                self._needed.notify()

    def _take_on(self, message: Message) -> None:
        """Begin with a message. What is under way in a lower epoch is over."""
        if self._routes is not None and self._routes.world.epoch > message.world.epoch:
            self._drop(message, "the epoch is over")
            return
        if self._routes is None or self._routes.world is not message.world:
            self._give_up("the epoch is over")
            self._routes = Routes(self._fabric.wiring, self._name, self._ranks, message.world)
        self._routes.take_on(message)

    def _give_up(self, reason: str, *, also: Iterable[Message] = ()) -> None:
        """Drop everything under way, and what had not begun."""
        routes, self._routes = self._routes, None
        if routes is not None:
            routes.abandon()
            for message in routes.under_way():
                self._drop(message, reason)
        for message in also:
            self._drop(message, reason)

    def _drop(self, message: Message, reason: str) -> None:
        """Conclude a message without a result, or with an error if anybody minds."""
        if message.is_completed():
            return
        if message.strict or not self._fabric.attempt_open:
            message.conclude(Interrupted(reason))
        else:
            with torch.no_grad():
                message.blank()

    def _wait(self, deadline: float, *, glances: int = 0) -> bool:
        """Wait until something can go on; return whether the time is up."""
        routes = self._routes
        if routes is None or not len(routes):
            return False
        poller = select.poll()
        poller.register(self._bell.fd, select.POLLIN)
        routes.watch(poller)
        end = min(deadline, *(message.deadline for message in routes.under_way()))
        with IDLE.waiting():
            for _ in range(glances):
                events = poller.poll(0)
                if events:
                    break
                os.sched_yield()
            else:
                events = poller.poll(max(0.0, end - time.monotonic()) * 1000 + 1)
        self._bell.clear(seen=any(fd == self._bell.fd for fd, _ in events))
        return time.monotonic() >= end
