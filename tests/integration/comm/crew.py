"""Several ranks in one process: real fabrics and sockets, a thread for each call that may wait.

Nothing here sleeps. Who should not be kept waiting and is, fails the test at `DEADLINE_S`.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from integration.comm.harness import SECRET, uid_of
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.group import TmoverGroup
from tmover.comm.link import Link
from tmover.comm.timeouts import Timeouts
from tmover.comm.world import Peer
from tmover.core.events import Member, Plan
from tmover.errors import Interrupted, LinkError

DEADLINE_S = 30.0
_NEVER_S = 100.0
TIMEOUTS = Timeouts(
    collective_s=_NEVER_S, barrier_s=_NEVER_S, state_s=_NEVER_S, handshake_s=_NEVER_S
)
EVERYBODY = "everybody"
Call = Callable[[], Any]


class Rank:
    """One process of a job, and what it should be doing."""

    def __init__(self, name: str) -> None:
        self.uid = uid_of(name)
        self.fabric = Fabric(
            job="job", secret=SECRET, uid=self.uid, address="127.0.0.1", timeouts=TIMEOUTS
        )
        self.place = -1
        self.epoch = 0
        """The world it is in."""
        self.ready = 0
        """The world it has prepared, 0 if none."""
        self.passed = False
        """Whether it has passed the barrier of that world, and not entered it yet."""
        self.over: set[int] = set()
        """The epochs it was told to roll back."""
        self.alive = True
        self.accused: list[tuple[int, tuple[str, ...], str]] = []
        self.fabric.on_broken = lambda *accusation: self.accused.append(accusation)

    def __repr__(self) -> str:
        return self.uid

    def member(self, rank: int) -> Member:
        return Member(rank=rank, worker=self.uid, node=self.uid, endpoint=self.fabric.endpoint)

    def take(self, place: int, groups: dict[str, tuple[int, ...]]) -> None:
        """Act as the rank of this place, with all the groups that it is in."""
        if place != self.place:
            for group in list(self.fabric.groups.values()):
                group.close()
            self.fabric.groups.clear()
            self.place = place
            self.fabric.rehearse(place, len(groups[EVERYBODY]))
        for name, ranks in groups.items():
            if place in ranks and name not in self.fabric.groups:
                TmoverGroup(self.fabric, name, ranks, rank=place, store=None)

    def enter(self) -> None:
        """Enter the world whose barrier was passed."""
        self.fabric.commit(self.ready)
        self.epoch, self.ready, self.passed = self.ready, 0, False

    def give_up(self, epoch: int) -> None:
        """Roll back what was prepared, or what never will be."""
        self.fabric.rollback(epoch)
        self.over.add(epoch)
        self.ready = 0

    def known(self) -> dict[str, Peer]:
        """Return its peers in the present world."""
        return {peer.uid: peer for peer in self.fabric.worlds.peers()}

    def open_links(self) -> set[Link]:
        """Return the links it holds open, whoever knows of them."""
        return {link for link in self.fabric.wiring._opener.links if link.sock.fileno() >= 0}

    def await_revocation(self, epoch: int) -> None:
        """Return once it has heard that its world of this epoch is revoked."""
        world = self.fabric.worlds.of(epoch)
        assert world is not None
        heard, _, _ = select.select([world.latch.fd], [], [], DEADLINE_S)
        assert heard, f"{self} did not hear that epoch {epoch} is revoked"

    def end(self, *, bye: bool) -> None:
        """Close every socket, as the end of its process would."""
        self.alive = False
        self.fabric.close(bye=bye)


def plan_of(epoch: int, ranks: Iterable[Rank]) -> Plan:
    return Plan(epoch=epoch, members=tuple(r.member(place) for place, r in enumerate(ranks)))


def links_of(peers: Iterable[Peer]) -> set[Link]:
    """Return all links to these peers."""
    return {link for peer in peers for link in (*peer.lanes.values(), *peer.ahead.values())}


class Threads:
    """Runs calls beside each other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(16)

    def together(self, calls: Sequence[Call]) -> list[Any]:
        """Return what each call returned; the exception of those that were ended is returned too.

        Any other exception is raised.
        """
        futures = [self._pool.submit(call) for call in calls]
        _, late = wait(futures, DEADLINE_S)
        assert not late, f"{len(late)} of {len(calls)} calls did not return"
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, Interrupted | LinkError):
                raise error
        return [
            future.result() if error is None else error
            for future, error in zip(futures, errors, strict=True)
        ]

    def close(self) -> None:
        self._pool.shutdown()


def is_ended(outcome: object) -> bool:
    """Return whether a call was ended by a revocation or a broken link."""
    return isinstance(outcome, Interrupted | LinkError)


# --- collectives ----------------------------------------------------------------------------------


class Job(NamedTuple):
    """A collective with values that no other has: nothing left behind can be mistaken for it."""

    kind: str
    group: str
    length: int
    serial: int

    def run(self, rank: Rank) -> bool:
        """Do it; return whether the result is right."""
        if self.kind in ("vote", "record"):
            return self._over_votes(rank.fabric)
        group = rank.fabric.groups[self.group]
        assert isinstance(group, TmoverGroup)
        return bool(getattr(self, f"_{self.kind}")(group))

    def _over_votes(self, fabric: Fabric) -> bool:
        own, size = fabric.rank, fabric.world_size
        said = [bytes(self._row(place).numpy()) for place in range(size)]
        if self.kind == "vote":
            return fabric.exchange(said[own]) == said
        heard = fabric.hand_on(said[own], to=(own + 1) % size, source=(own - 1) % size)
        return heard == said[(own - 1) % size]

    def _row(self, rank: int, to: int = 0) -> torch.Tensor:
        return torch.full((self.length,), self.serial * 64 + rank * 8 + to)

    def _all_reduce(self, group: TmoverGroup) -> bool:
        row, size = self._row(group.rank()), group.size()
        options = dist.AllreduceOptions()
        options.asyncOp = bool(self.serial % 2)
        group.allreduce([row], options).wait()
        return torch.equal(row, sum((self._row(r) for r in range(size)), self._row(0) * 0))

    def _broadcast(self, group: TmoverGroup) -> bool:
        options = dist.BroadcastOptions()
        options.rootRank = self.serial % group.size()
        row = self._row(group.rank())
        group.broadcast([row], options).wait()
        return torch.equal(row, self._row(options.rootRank))

    def _all_gather(self, group: TmoverGroup) -> bool:
        rows = [torch.empty_like(self._row(0)) for _ in range(group.size())]
        group.allgather([rows], [self._row(group.rank())]).wait()
        return all(torch.equal(row, self._row(rank)) for rank, row in enumerate(rows))

    def _reduce_scatter(self, group: TmoverGroup) -> bool:
        own, size = group.rank(), group.size()
        out = torch.empty_like(self._row(0))
        rows = [self._row(own, to) for to in range(size)]
        group.reduce_scatter([out], [rows], dist.ReduceScatterOptions()).wait()
        return torch.equal(out, sum((self._row(r, own) for r in range(size)), out * 0))

    def _all_to_all(self, group: TmoverGroup) -> bool:
        own, size = group.rank(), group.size()
        outs = [torch.empty_like(self._row(0)) for _ in range(size)]
        group.alltoall(outs, [self._row(own, to) for to in range(size)]).wait()
        return all(torch.equal(out, self._row(rank, own)) for rank, out in enumerate(outs))

    def _barrier(self, group: TmoverGroup) -> bool:
        return bool(group.barrier().wait())

    def _message(self, group: TmoverGroup) -> bool:
        own, size = group.rank(), group.size()
        row = torch.empty_like(self._row(0))
        sent = group.send([self._row(own)], (own + 1) % size, self.serial)
        group.recv([row], (own - 1) % size, self.serial).wait()
        return bool(sent.wait()) and torch.equal(row, self._row((own - 1) % size))


KINDS = ("vote", "record", "all_reduce", "broadcast", "all_gather", "reduce_scatter",
         "all_to_all", "barrier", "message")  # fmt: skip


def carry_out(rank: Rank, what: Job) -> bool:
    """Do a collective; return whether it was done. Values that are wrong must be void."""
    right = what.run(rank)
    if not right:
        assert rank.fabric.attempt_open, f"{rank}: wrong values of {what}"
        assert rank.fabric.mode is Mode.REVOKED, f"{rank}: wrong values of {what}"
    return right
