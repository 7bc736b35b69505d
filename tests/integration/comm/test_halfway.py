"""A barrier that only some ranks have passed: the controller's own orders, on real sockets."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import pytest

from integration.comm.crew import (
    EVERYBODY,
    KINDS,
    Call,
    Job,
    Rank,
    Threads,
    carry_out,
    is_ended,
    plan_of,
)
from support.jobs import Story, overdue, reported, verified
from tmover.core.events import Broken, Wait
from tmover.core.orders import Assign

TIMEOUT_S = 10.0
"""Long enough for any prepare, if nobody waits in vain."""


def prepare(
    rank: Rank, epoch: int, ranks: Sequence[Rank], relink: Sequence[tuple[str, str]]
) -> None:
    rank.fabric.prepare(plan_of(epoch, ranks), timeout_s=TIMEOUT_S, relink=relink)
    rank.ready = epoch


class Switching:
    """A job of three whose epoch 2 is about to begin, with `s0` for `a1`; an agent has one rank."""

    def __init__(self) -> None:
        self.threads = Threads()
        self.ranks = {name: Rank(name) for name in ("a0", "a1", "a2", "s0")}
        for place, names in enumerate((("a0",), ("a1", "s0"), ("a2",))):
            for name in names:
                self.ranks[name].take(place, {EVERYBODY: (0, 1, 2)})
        self.holders = [self.ranks[name] for name in ("a0", "s0", "a2")]
        self.cross(1, [self.ranks[name] for name in ("a0", "a1", "a2")])
        self.story = Story(standbys=2).switching()
        self.story.tell(verified("s0/0", 2, 5))

    def cross(
        self,
        epoch: int,
        ranks: Sequence[Rank],
        *,
        entering: Sequence[Rank] | None = None,
        relink: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Let all prepare and hear one another in the barrier, and some enter."""
        self.together([functools.partial(prepare, rank, epoch, ranks, relink) for rank in ranks])
        self.together([functools.partial(rank.fabric.barrier, epoch) for rank in ranks])
        for rank in ranks if entering is None else entering:
            rank.enter()

    def together(self, calls: Sequence[Call]) -> None:
        outcomes = self.threads.together(calls)
        assert not any(map(is_ended, outcomes)), outcomes

    def halve(self, entering: str) -> list[tuple[str, str]]:
        """Let one rank alone enter epoch 2; return whose links the controller has opened afresh."""
        self.cross(2, self.holders, entering=[self.ranks[entering]])
        for rank in self.holders:
            rank.fabric.revoke(2, "a test says so")
        broken = Broken(job="j", worker="s0/0", epoch=2, peers=(), reason="a test says so")
        self.story.tell(broken, overdue(Wait.ACCUSE, 2))
        now = {"a0": 1, "a1": 1, "a2": 1, "s0": 0, entering: 2}
        said = [reported(f"{name}/0", 5, of=2, epoch=epoch) for name, epoch in now.items()]
        orders = [order for order in self.story.tell(*said) if isinstance(order, Assign)]
        assert [order.agent for order in orders] == ["a0", "s0", "a2"]
        uids = {f"{name}/0": rank.uid for name, rank in self.ranks.items()}
        return [(uids[one], uids[other]) for one, other in orders[0].relink]

    def work(self) -> None:
        """All ranks of epoch 3 do collectives, over every link there is."""
        for serial, kind in enumerate(KINDS):
            what = Job(kind, EVERYBODY, 3, serial)
            self.together([functools.partial(carry_out, rank, what) for rank in self.holders])

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.end(bye=True)
        self.threads.close()


@pytest.fixture
def job() -> Iterator[Switching]:
    made = Switching()
    yield made
    made.close()


def test_a_joiner_that_alone_has_passed_goes_on_with_those_that_have_not(job: Switching) -> None:
    """It prepares first, when the others have not closed yet what it uses."""
    relink = job.halve("s0")

    for name in ("s0", "a0", "a2"):
        prepare(job.ranks[name], 3, job.holders, relink)
    job.cross(3, job.holders, relink=relink)

    job.work()


@pytest.mark.parametrize("entering", ["a0", "a2"])
def test_a_stayer_that_alone_has_passed_goes_on_with_those_that_have_not(
    job: Switching, entering: str
) -> None:
    relink = job.halve(entering)

    job.cross(3, job.holders, relink=relink)

    job.work()


@pytest.mark.parametrize("entering", ["a0", "s0"])
def test_two_stayers_keep_their_link_whoever_has_passed(job: Switching, entering: str) -> None:
    one, other = job.ranks["a0"], job.ranks["a2"]
    before = one.known()[other.uid], other.known()[one.uid]

    job.cross(3, job.holders, relink=job.halve(entering))

    assert (one.known()[other.uid], other.known()[one.uid]) == before
