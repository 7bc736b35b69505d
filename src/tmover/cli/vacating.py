"""What `tmover maintenance run` does: ask the controller, and wait until the nodes are left."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tmover.cli.moving import leave
from tmover.controller.client import Client, ask
from tmover.errors import ControllerUnavailable, Refused
from tmover.scheduler.slurm.maintenance import Outcome, Vacate, outcome
from tmover.wire import JobStatus, StatusReply, StatusRequest

_POLL_S = 0.5


class Report(NamedTuple):
    """One node and job, and what came of it."""

    vacate: Vacate
    text: str
    is_vacated: bool = False

    def __str__(self) -> str:
        """Return the line for people."""
        return f"{self.vacate}: {self.text}"

    def json(self) -> str:
        """Return the line for programs."""
        one = self.vacate
        fields = {
            "node": one.node,
            "job": one.job,
            "what": one.what,
            "deadline": one.deadline,
            "standby": one.is_standby,
            "vacated": self.is_vacated,
            "outcome": self.text,
        }
        return json.dumps(fields)


def request(client: Client, vacates: Sequence[Vacate], request_s: float) -> list[Report]:
    """Ask that all be left, each job once; return what was refused."""
    refused: list[Report] = []
    for job in dict.fromkeys(one.job for one in vacates):
        some = [one for one in vacates if one.job == job]
        reason = "; ".join(dict.fromkeys(one.what for one in some))
        try:
            leave(client, job, [one.node for one in some], reason, request_s)
        except Refused as error:
            refused += [Report(one, str(error)) for one in some]
    return refused


class Watch:
    """Waits, for some time at most, until nodes are left."""

    def __init__(
        self,
        look: Callable[[str], JobStatus],
        *,
        wait_s: float,
        now: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`look` returns a job's status; it may raise `ControllerUnavailable` or `Refused`."""
        self._look = look
        self._now, self._pause = now, pause
        self._began = now()
        self._wait_s = wait_s

    def run(self, vacates: Iterable[Vacate], say: Callable[[Report], object]) -> bool:
        """Say of each what came of it, as soon as it is over; return whether all are left."""
        waiting, all_left = list(vacates), True
        while waiting:
            for one in list(waiting):
                found = self._judge(one)
                late = self._now() >= self._until(one)
                if not (found.is_over or late):
                    continue
                waiting.remove(one)
                all_left &= found.is_vacated
                text = found.text if found.is_over else f"not left in time: {found.text}"
                say(Report(one, text, found.is_vacated))
            if waiting:
                self._pause(_POLL_S)
        return all_left

    def _until(self, one: Vacate) -> float:
        """Return when to wait no longer; a deadline that had passed before we began is none."""
        until = self._began + self._wait_s
        if one.deadline is None or one.deadline <= self._began:
            return until
        return min(until, one.deadline)

    def _judge(self, one: Vacate) -> Outcome:
        try:
            return outcome(one, self._look(one.job))
        except ControllerUnavailable as error:  # it may be on its way back
            return Outcome(str(error))
        except Refused as error:
            return Outcome(str(error), is_over=True)


def looker(state: pathlib.Path, request_s: float) -> Callable[[str], JobStatus]:
    """Return what asks the controller of `state` for a job's status, each time anew."""

    def look(job: str) -> JobStatus:
        answer = ask(state, StatusRequest(job=job), request_s)
        if not isinstance(answer, StatusReply):
            msg = f"the controller did not say how job {job} is"
            raise Refused(msg)
        return answer.jobs[0]

    return look
