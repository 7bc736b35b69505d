"""A scheduler that answers what a test wrote down, for what no real one does on demand."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Union

from tmover.scheduler.interface import NodeInfo

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

    def order(self, job: str, exclude: Collection[str]) -> str | None:
        self.calls.append(f"order {job} but {','.join(exclude)}")
        answer = _next(self.orders)
        assert answer is None or isinstance(answer, str)
        return answer


def _next(answers: list[Answer]) -> Answer:
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if isinstance(answer, Exception):
        raise answer
    return answer
