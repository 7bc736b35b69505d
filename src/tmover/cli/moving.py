"""Asking the controller to leave nodes, and following the moves to their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tmover.cli.watch import NOTE, MoveWatch, News
from tmover.controller.client import Client
from tmover.errors import Refused
from tmover.wire import Accepted, JobStatus, MoveRequest, StatusReply, StatusRequest

_POLL_S = 0.2
Say = Callable[[str, News], object]
"""Told the job and what is new of it."""


def live_jobs(client: Client, request_s: float) -> tuple[JobStatus, ...]:
    """Return the jobs that have not ended."""
    answer = client.request(StatusRequest(ended=0), request_s)
    return answer.jobs if isinstance(answer, StatusReply) else ()


def late(wait_s: float) -> News:
    """Return that a move is not over in time, and what becomes of it."""
    text = f"not done within {wait_s:g} s: it stays asked for, `tmover status` shows what it awaits"
    return News("late", text)


def leave(
    client: Client, job: str, nodes: Sequence[str], reason: str, request_s: float
) -> Accepted | None:
    """Ask that the job leave `nodes`, in this order. None if it is on none of them any more."""
    request = MoveRequest(job=job, node=nodes[0], more=tuple(nodes[1:]), reason=reason)
    try:
        answer = client.request(request, request_s)
    except Refused:
        now = [one for one in live_jobs(client, request_s) if one.job == job]
        if any(set(one.nodes) & set(nodes) for one in now):
            raise
        return None
    return answer if isinstance(answer, Accepted) else None


class JobMoves:
    """Follows the moves of one job off some nodes."""

    def __init__(self, job: str, nodes: Collection[str]) -> None:
        self.job = job
        self._nodes = sorted(nodes)
        self._watches: dict[str, MoveWatch] = {}
        self.failed: set[str] = set()
        """Nodes that are not left."""

    def give_up(self) -> None:
        """Wait no longer: what is not left counts as failed."""
        self.failed |= {*self._nodes}
        self._nodes.clear()

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for any more."""
        return not self._nodes

    def look(self, status: JobStatus) -> list[News]:
        """Return what is new, each of the job's notes once."""
        found: dict[News, None] = {}
        for node in list(self._nodes):
            watch = self._watches.setdefault(node, MoveWatch(node, status))
            found |= dict.fromkeys(watch.look(status))
            if watch.is_over:
                self._nodes.remove(node)
                is_left = watch.is_done or status.code is not None  # ended, it is nowhere
                self.failed |= set() if is_left else {node}
        return sorted(found, key=lambda news: news.phase != NOTE)


def follow(
    client: Client,
    jobs: Mapping[str, Collection[str]],
    say: Say,
    *,
    request_s: float,
    wait_s: float,
) -> dict[str, set[str]]:
    """Say what the moves do until all are over, or the time is; return the nodes not left, by job.

    A move that is not over goes on: what was asked stays asked.
    """
    until = time.monotonic() + wait_s
    moves = [JobMoves(job, nodes) for job, nodes in jobs.items()]
    while True:
        for move in [move for move in moves if not move.is_over]:
            answer = client.request(StatusRequest(job=move.job), request_s)
            for news in move.look(answer.jobs[0]) if isinstance(answer, StatusReply) else ():
                say(move.job, news)
        if all(move.is_over for move in moves):
            return {move.job: move.failed for move in moves if move.failed}
        if time.monotonic() >= until:
            for move in [move for move in moves if not move.is_over]:
                say(move.job, late(wait_s))
                move.give_up()
        else:
            time.sleep(_POLL_S)
