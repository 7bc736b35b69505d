"""A scheduler that answers what a test wrote down, for what no real one does on demand."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar, Union

from tmover import wire
from tmover.core.orders import Errand
from tmover.scheduler.interface import Allocation, NodeInfo, Outcome

T = TypeVar("T")

Answer = Union[Exception, str, None, list[NodeInfo]]


class ScriptedScheduler:
    """Gives the next of `answers`, then keeps giving the last; notes each call."""

    def __init__(self, *answers: Answer) -> None:
        self.answers: list[Answer] = list(answers)
        self.ends: list[Answer] = [None]
        self.orders: list[Answer] = ["node9"]
        self.calls: list[str] = []

    def nodes(self) -> list[NodeInfo]:
        answer = _next(self.answers) if self.answers else []
        assert isinstance(answer, list)
        return answer

    def start(
        self, node: str, argv: Sequence[str], *, env: Mapping[str, str], job: str, log: pathlib.Path
    ) -> str:
        raise NotImplementedError

    def drain(self, node: str, reason: str) -> None:
        raise NotImplementedError

    def resume(self, node: str) -> None:
        raise NotImplementedError

    def end(self, node: str, reason: str) -> None:
        self.calls.append(f"end {node}: {reason}")
        _next(self.ends)

    def reassign(self, node: str, job: str, to: str) -> None:
        self.calls.append(f"reassign {node} from {job} to {to}")

    def order(self, job: str, exclude: Collection[str]) -> str | None:
        self.calls.append(f"order {job} but {','.join(exclude)}")
        answer = _next(self.orders)
        assert answer is None or isinstance(answer, str)
        return answer


class ScriptedAllocations:
    """Says of jobs and nodes what a test wrote down, the last for ever; notes who was told what."""

    def __init__(self, *looks: list[Allocation] | Exception) -> None:
        self.looks = list(looks)
        self.shown: list[NodeInfo] = []
        self.successors: list[str | Exception] = []
        self.outcomes: list[Outcome | Exception] = [Outcome.done()]
        self.errands: list[Errand] = []
        self.adopted: list[tuple[str, str, wire.SlurmSpec]] = []
        self.forsaking: list[Exception | None] = [None]
        self.forsaken: list[str] = []
        self.nudges = 0
        self.looked = 0
        self.threads: list[threading.Thread] = []
        """Those in which something was done that may take long."""

    def adopt(self, job: str, owner: str, spec: wire.SlurmSpec) -> None:
        self.adopted.append((job, owner, spec))

    def belongs(self, spec: wire.SlurmSpec, owner: str) -> bool:
        del spec, owner
        return True

    def succeed(self, job: str) -> str:
        self.threads.append(threading.current_thread())
        return said(self.successors)

    def forsake(self, job: str) -> None:
        self.threads.append(threading.current_thread())
        said(self.forsaking)
        self.forsaken.append(job)

    def nodes(self) -> list[NodeInfo]:
        return self.shown

    def look(self, jobs: Collection[str]) -> list[Allocation]:
        self.looked += 1
        return [one for one in said(self.looks) if one.job in jobs]

    def nudge(self) -> None:
        self.nudges += 1

    def load(self) -> str:
        return "Slurm is asked nothing"

    def carry_out(self, errand: Errand) -> Outcome:
        self.threads.append(threading.current_thread())
        self.errands.append(errand)
        return said(self.outcomes)


def said(answers: list[T | Exception]) -> T:
    """Return, or raise, the next of the answers; the last is given for ever."""
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


def _next(answers: list[Answer]) -> Answer:
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if isinstance(answer, Exception):
        raise answer
    return answer
