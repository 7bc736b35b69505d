"""Collectives that a communicator of torch carries: started in the caller's thread, on his stream.

What goes wrong in them breaks the world, as a broken link does, and never reaches autograd: the
result is then an answer that nobody keeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from tmover.comm.fabric import Fabric
from tmover.comm.generation import Use
from tmover.comm.idle import IDLE
from tmover.comm.overstock import OverStock
from tmover.comm.stock import Stock
from tmover.comm.untraced import untraced
from tmover.comm.work import Work
from tmover.errors import Interrupted, LinkError

logger = logging.getLogger(__name__)

_GLANCE_S = 0.001
Ask = Callable[[OverStock], None]
Judge = Callable[[Exception], Exception | None]
"""Says what the caller is to be told about what went wrong, if anything."""


@untraced
class Launched(Work):
    """A collective that a communicator carries out. `judge` says, once, what an error means.

    `limit`: how long to wait if nobody says; a message of gloo's would go by its communicator's.
    `streamed`: who has waited for it has only put it in its place on a stream.
    """

    def __init__(
        self,
        result: Any,
        works: Sequence[Any],
        judge: Judge,
        *,
        source: int,
        streamed: bool,
        limit: timedelta,
    ) -> None:
        super().__init__(result, pending=bool(works))
        self._works = works
        self._judge: Judge | None = judge
        self._judging = threading.Lock()
        self._source = source
        self._streamed = streamed
        self._limit = limit

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when it is done, or in its place on the stream. Raises what it is judged to be."""
        with IDLE.waiting():
            error = self._await(timeout)
        self.conclude(error)
        if self._error is not None:
            raise self._error
        return True

    def _await(self, timeout: timedelta) -> Exception | None:
        error: Exception | None = None
        for work in self._works:
            found = _await(work, timeout or self._limit)
            error = error or found
        return error

    def settle(self, timeout_s: float) -> bool:
        """Wait until it is done, whatever comes of it; return whether that is so.

        Nothing is waited for twice: gloo writes some results when it is waited for.
        """
        deadline = time.monotonic() + timeout_s
        if not self._done:
            error = self._await(timedelta(seconds=max(0.001, timeout_s)))
            if error is not None and time.monotonic() > deadline:
                return False  # it has not failed, as far as one can know
            self.conclude(error)
        while not self.is_over:
            if time.monotonic() > deadline:
                return False
            time.sleep(_GLANCE_S)  # what was put on a stream can only be asked
        return True

    def conclude(self, error: Exception | None) -> None:
        """Take note of how it ended. Only the first time counts."""
        with self._judging:
            judge, self._judge = self._judge, None
            if judge is not None and error is not None:
                self._error = judge(error)
        if judge is not None:
            self.finish()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result; it never carries an error."""
        if self._done:
            return super().get_future()
        try:
            futures = [work.get_future() for work in self._works]
        except RuntimeError:  # messages have none
            self.conclude(self._await(timedelta(0)))
            return super().get_future()
        first = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
        is_promised = IDLE.promise()

        def ended(future: Any) -> Any:
            if is_promised:
                IDLE.keep()
            try:
                future.value()
            except Exception as error:  # noqa: BLE001 - a library's edge: it is judged
                self.conclude(error)
            else:
                self.conclude(None)
            return self._result

        return first.then(ended)

    @property
    def is_over(self) -> bool:
        """Whether its end was taken note of, on the stream too."""
        if not self._streamed:
            return self._done  # gloo does not know that of all its works, once waited for
        return self._done and all(work.is_completed() for work in self._works)

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._done or all(work.is_completed() for work in self._works)

    def _source_rank(self) -> int:
        """Return who sent what was received."""
        try:
            return int(self._works[0]._source_rank())
        except (IndexError, RuntimeError):
            return self._source


def _await(work: Any, timeout: timedelta) -> Exception | None:
    """Wait for one work of torch's; return what it raises."""
    try:
        _ = work.wait(timeout) if timeout else work.wait()
    except Exception as error:  # noqa: BLE001 - a library's edge: it is judged
        return error
    return None


class Launches:
    """What one group has started and nobody has seen the end of."""

    def __init__(self, fabric: Fabric, name: str, ranks: tuple[int, ...]) -> None:
        self._fabric = fabric
        self._name = name
        self._ranks = ranks
        self._lock = threading.Lock()
        self._under_way: list[Launched] = []

    def start(
        self,
        result: Any,
        ask: Ask,
        answer: Callable[[], None],
        *,
        device: str,
        strict: bool,
        timeout_s: float,
        source: int | None = None,
    ) -> Launched:
        """Start a collective; `answer` stands in for it if the world breaks.

        `source`: of a message, who is said to have sent it.
        """
        fabric, epoch = self._fabric, self._fabric.epoch
        stock = fabric.generation.stock(device)
        works: list[Any] = []
        try:
            world = fabric.present()
            epoch = world.epoch
            inner = fabric.generation.communicator(
                world, Use(self._name, device), self._ranks, timeout_s=timeout_s
            )
            carrier = OverStock(inner.backend)
            with torch.no_grad():
                ask(carrier)
            works = carrier.works
        except Exception as error:
            judged = _Judgement(fabric, epoch, stock, answer, strict=strict)(error, at_once=True)
            if judged is error:
                raise
            if judged is not None:
                raise judged from error
        judge = _Judgement(fabric, epoch, stock, answer, strict=strict)
        streamed = device != "cpu"
        IDLE.is_blind |= streamed
        launched = Launched(
            result,
            works,
            judge,
            source=source or 0,
            streamed=streamed,
            limit=timedelta(seconds=0 if source is None or streamed else timeout_s),
        )
        if works:
            self._keep(launched)
        return launched

    def _keep(self, launched: Launched) -> None:
        with self._lock:
            self._under_way = [one for one in self._under_way if not one.is_over]
            self._under_way.append(launched)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; return whether that is so."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            launched = list(self._under_way)
        left = [one for one in launched if not one.settle(deadline - time.monotonic())]
        with self._lock:
            self._under_way = [one for one in self._under_way if one in left]
        return not left

    def close(self) -> None:
        """Forget what was started: it holds communicators."""
        with self._lock:
            self._under_way = []


class _Judgement:
    """What an error of a communicator means: a world that is broken, or a call that was wrong."""

    def __init__(
        self,
        fabric: Fabric,
        epoch: int,
        stock: Stock,
        answer: Callable[[], None],
        *,
        strict: bool,
    ) -> None:
        self._fabric = fabric
        self._epoch = epoch
        self._stock = stock
        self._answer = answer
        self._strict = strict

    def __call__(self, error: Exception, *, at_once: bool = False) -> Exception | None:
        """Return what the caller is to be told; break the world if that is what it means."""
        fabric, epoch = self._fabric, self._epoch
        if isinstance(error, LinkError) and error.peers:
            fabric.observe(epoch, error.peers, str(error))
        elif self._breaks(error, at_once=at_once):  # whom it has lost, links will say
            why = str(error).partition("\n")[0]
            world = fabric.worlds.of(epoch)
            if world is not None and not world.latch.is_set:
                logger.warning("a communicator inside a group failed in epoch %d: %s", epoch, why)
            fabric.revoke(epoch, why)
        else:
            if not at_once:
                fabric.fault = error
            return error
        if self._strict or not fabric.attempt_open:
            return Interrupted(str(error))
        with torch.no_grad():
            self._answer()
        return None

    def _breaks(self, error: Exception, *, at_once: bool) -> bool:
        """Return whether the world is over with this error, or was before."""
        world = self._fabric.worlds.of(self._epoch)
        if world is None or world.latch.is_set or isinstance(error, (LinkError, Interrupted)):
            return True
        return self._stock.is_failure(error, at_once=at_once)
