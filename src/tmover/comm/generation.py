"""The communicators of torch inside our groups, one generation of them per world.

What carries tensors cannot exchange a rank, so the next world gets communicators of its own where
the leaver was in the group, built while training goes on; `commit` exchanges the pointer. A group
whose members are all the same keeps the very object it has. After a failure nothing is kept: a
collective may be stuck half way in any of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tmover.comm.errands import Errands
from tmover.comm.inner import Inner
from tmover.comm.rendezvous import Until
from tmover.comm.stock import Communicator, Stock, stocks
from tmover.comm.store import Call, GroupStore, call_of, is_of
from tmover.comm.timeouts import Timeouts
from tmover.comm.wiring import Wiring
from tmover.comm.world import Running, World
from tmover.core.events import Plan
from tmover.errors import Interrupted, LinkError

logger = logging.getLogger(__name__)


class Use(NamedTuple):
    """A group, and the type of device its tensors are on."""

    group: str
    device: str


def keeps(ranks: Iterable[int], before: Plan | None, after: Plan, *, revoked: bool) -> bool:
    """Return whether a group keeps its communicator from one world to the next."""
    if before is None or revoked:
        return False
    return all(before.member(rank).worker == after.member(rank).worker for rank in ranks)


def agreed(wanted: Mapping[int, Iterable[Use]], ranks: Mapping[str, tuple[int, ...]]) -> list[Use]:
    """Return what all ranks of its group want, in the order in which all of them build."""
    votes = Counter(use for rank, uses in wanted.items() for use in {*uses})
    return sorted(
        use
        for use in votes
        if use.group in ranks and all(use in wanted.get(rank, ()) for rank in ranks[use.group])
    )


class Generation:
    """All of them in one process. Does nothing where no stock is given."""

    def __init__(self, stocks: Mapping[str, Stock], wiring: Wiring, timeouts: Timeouts) -> None:
        self._stocks = stocks
        self._wiring = wiring
        self._timeouts = timeouts
        self._errands = Errands()
        self._answers = Errands()
        self._lock = threading.RLock()
        self._used: dict[Use, None] = {}
        self._inners: dict[int, dict[Use, Inner]] = {}
        self._built: Counter[tuple[int, Use]] = Counter()
        """How often in an epoch: what was aborted in it is built again."""
        self._over: list[Inner] = []
        self._worlds: dict[int, World] = {}
        self._groups: Mapping[str, Running] = {}
        if stocks:
            wiring.rendezvous.on_told = self._on_told

    def carries(self, group: str, device: str) -> bool:
        """Return whether a group's collectives go this way, and note that they are used."""
        if device not in self._stocks:
            return False
        self._stocks[device].note_use()
        self._used[Use(group, device)] = None
        return True

    def rename(self, names: Mapping[str, str]) -> None:
        """Take what groups have used, in rehearsal, for what others will; names by those before."""
        used = [Use(names.get(use.group, use.group), use.device) for use in self._used]
        self._used = dict.fromkeys(used)

    def stock(self, device: str) -> Stock:
        """Return what communicators for a type of device come from."""
        return self._stocks[device]

    def inners(self, epoch: int) -> dict[Use, Inner]:
        """Return what is there in an epoch, built or not."""
        with self._lock:
            return dict(self._inners.get(epoch, {}))

    # --- one world after the other ----------------------------------------------------------------

    def prepare(
        self,
        world: World,
        before: World | None,
        groups: Mapping[str, Running],
        timeout_s: float,
    ) -> None:
        """Build what the groups in use will need in `world`, with all its members."""
        if not self._stocks or world.rank is None:
            return
        self._worlds[world.epoch], self._groups = world, groups
        until = Until(world.latch, time.monotonic() + timeout_s)
        if not self._errands.settle(min(timeout_s / 2, self._timeouts.handshake_s)):
            logger.warning("communicators of a world that is over do not end")
        self._wiring.meet(world, timeout_s=timeout_s)
        ranks = {name: g.ranks for name, g in dict(groups).items() if world.rank in g.ranks}
        wanted = self._agree("wanted", world, self._anew(world, before, ranks), ranks, until)
        made = [use for use in wanted if self._make(world, use, ranks[use.group], until)]
        sure = self._agree("made", world, made, ranks, until)
        self._forsake(world.epoch, set(wanted) - set(sure))

    def _make(self, world: World, use: Use, ranks: tuple[int, ...], until: Until) -> bool:
        """Build one ahead. If that fails, and no peer is to blame, it is built at first use."""
        try:
            self._get(world, use, ranks, until, timeout_s=self._timeouts.collective_s)
        except LinkError as error:
            if error.peers:
                raise
            logger.warning("group %s gets its communicator in the pause: %s", use.group, error)
            return False
        return True

    def _forsake(self, epoch: int, uses: Iterable[Use]) -> None:
        """Drop what some ranks have built and others could not."""
        with self._lock:
            there = self._inners.get(epoch, {})  # a group may be destroyed, or all be given up
            inners = {use: there.pop(use) for use in uses if use in there}
        self._abort(inners, "another rank has none")
        self._drop(list(inners.values()))

    def _anew(
        self, world: World, before: World | None, ranks: Mapping[str, tuple[int, ...]]
    ) -> list[Use]:
        """Return what this process has used and cannot keep."""
        plan = before.plan if before is not None else None
        revoked = before is not None and before.latch.is_set
        return [
            use
            for use in list(self._used)
            if use.group in ranks and not keeps(ranks[use.group], plan, world.plan, revoked=revoked)
        ]

    def _agree(
        self,
        what: str,
        world: World,
        own: list[Use],
        ranks: Mapping[str, tuple[int, ...]],
        until: Until,
    ) -> list[Use]:
        """Hear what every member says, and return what holds for all ranks of its group."""
        rendezvous, peers, epoch = self._wiring.rendezvous, world.peers, world.epoch
        said = json.dumps(own).encode()
        rendezvous.tell(peers.values(), epoch, f"{what}/{world.rank}", said, until=until)
        keys = {f"{what}/{rank}": peer for rank, peer in peers.items()}
        heard = rendezvous.hear(epoch, keys, until=until, among=peers.values())
        told = {
            rank: [Use(*use) for use in json.loads(value)]
            for rank, value in zip(peers, heard, strict=True)
        }
        return agreed({**told, world.own_rank: own}, ranks)

    def commit(self, world: World, before: World | None) -> None:
        """Let the groups use what was prepared for `world`, and what they keep."""
        with self._lock:
            inners = self._inners.setdefault(world.epoch, {})
            for epoch in [epoch for epoch in self._worlds if epoch < world.epoch]:
                del self._worlds[epoch]
            for epoch in [epoch for epoch in self._inners if epoch < world.epoch]:
                plan = before.plan if before is not None and before.epoch == epoch else None
                for use, inner in self._inners.pop(epoch).items():
                    kept = keeps(inner.ranks, plan, world.plan, revoked=bool(inner.aborted))
                    # what somebody has used, all have built before that step was over
                    if kept and inner.communicator is not None and use not in inners:
                        inner.whole = True
                        inners[use] = inner
                    else:
                        self._over.append(inner)
            for epoch, use in [key for key in self._built if key[0] < world.epoch]:
                del self._built[epoch, use]
        self._wiring.rendezvous.forget(lambda epoch, _: epoch < world.epoch)

    def give_up(self, epoch: int, reason: str) -> None:
        """Abort and drop what was prepared for `epoch`."""
        with self._lock:
            self._worlds.pop(epoch, None)
            inners = self._inners.pop(epoch, {})
        self._abort(inners, reason)
        self._drop(list(inners.values()))
        self._wiring.rendezvous.forget(lambda other, _: other == epoch)

    def release(self) -> None:
        """Drop what no group uses any more."""
        with self._lock:
            over, self._over = self._over, []
        self._drop(over)

    def leave(self, group: str, reason: str) -> None:
        """Drop what a group uses that is destroyed; abort it if there is a `reason`."""
        with self._lock:
            for use in [use for use in self._used if use.group == group]:
                del self._used[use]
            gone = {
                use: inners.pop(use)
                for inners in self._inners.values()
                for use in list(inners)
                if use.group == group
            }
        if reason:
            self._abort(gone, reason)
        for inner in gone.values():
            inner.aborted = inner.aborted or "its group was destroyed"
        self._drop(list(gone.values()))
        self._wiring.rendezvous.forget(lambda _, key: is_of(group, key))

    def abort(self, epoch: int, reason: str) -> None:
        """End every collective of a world that is broken."""
        self._abort(self.inners(epoch), reason)

    def _abort(self, inners: Mapping[Use, Inner], reason: str) -> None:
        """Abort in one order on all ranks; what may take long, where nobody waits for it."""
        patient = []
        for _, inner in sorted(inners.items()):
            if inner.stock.patient:
                inner.aborted = inner.aborted or reason
                patient.append(inner)
            else:
                inner.abort(reason)
        if patient:
            self._errands.send("abort", functools.partial(_abort_all, patient, reason))

    def _drop(self, inners: list[Inner]) -> None:
        """Let go of communicators where nobody waits: they join their threads."""
        if any(inner.communicator is not None for inner in inners):
            self._errands.send("drop", functools.partial(_drop_all, inners))

    # --- what a collective asks for ---------------------------------------------------------------

    def communicator(
        self, world: World, use: Use, ranks: tuple[int, ...], *, timeout_s: float
    ) -> Communicator:
        """Return what carries a collective in `world`, built if it is the first."""
        until = Until(world.latch, time.monotonic() + timeout_s)
        inner = self.inners(world.epoch).get(use)
        communicator = inner.communicator if inner is not None else None
        if inner is None or communicator is None:
            inner, communicator = self._get(world, use, ranks, until, timeout_s=timeout_s)
        if not inner.whole:  # or a rank could enter the next world without what others keep
            communicator.store.hear_built(until)
            inner.whole = True
        return inner.get(lambda: communicator, timeout_s=timeout_s)

    def _get(
        self, world: World, use: Use, ranks: tuple[int, ...], until: Until, *, timeout_s: float
    ) -> tuple[Inner, Communicator]:
        with self._lock:
            inners = self._inners.setdefault(world.epoch, {})
            if use not in inners or (inners[use].aborted and not world.latch.is_set):
                inners[use] = Inner(self._stocks[use.device], ranks)
            inner = inners[use]
        build = functools.partial(self._build, world, use, inner, until)
        return inner, inner.get(build, timeout_s=timeout_s)

    def _build(self, world: World, use: Use, inner: Inner, until: Until) -> Communicator:
        """Meet the other members, and then build, which they all do now and so takes no time."""
        ranks = inner.ranks
        self._built[world.epoch, use] += 1
        store = GroupStore(
            self._wiring.rendezvous,
            call=Call(*use, self._built[world.epoch, use]),
            epoch=world.epoch,
            peers={rank: world.peers[rank] for rank in ranks if rank != world.rank},
            until=until,
        )
        own, limit_s = ranks.index(world.own_rank), self._timeouts.handshake_s
        store.meet(world.own_rank)
        store.hurry(limit_s)
        try:
            communicator = self._errands.run(
                f"build-{use.group}",
                functools.partial(inner.stock.build, store, own, len(ranks), timeout_s=limit_s),
                until=until,
                late=_abandon,
            )
        except LinkError as error:
            store.say_built(world.own_rank, str(error))
            raise
        store.say_built(world.own_rank)
        store.serve(limit_s)
        return communicator

    # --- what others ask for ----------------------------------------------------------------------

    def created(self) -> None:
        """Come to those who are here to build for a group that is new in this process."""
        for epoch in list(self._worlds):
            for key in self._wiring.rendezvous.keys(epoch):
                self._on_told(epoch, key)

    def _on_told(self, epoch: int, key: str) -> None:
        """Come too if somebody is here to build: it may be long until this process uses it.

        And two ranks that use two groups in opposite orders would wait for each other.
        """
        call = call_of(key)
        if call is None or call.device not in self._stocks:
            return
        use = Use(call.group, call.device)
        with self._lock:
            world, group = self._worlds.get(epoch), self._groups.get(call.group)
            if world is None or world.latch.is_set or group is None:
                return
            inners = self._inners.setdefault(epoch, {})
            if use in inners or call.turn != self._built[epoch, use] + 1:
                return
            inners[use] = Inner(self._stocks[use.device], group.ranks)
        come = functools.partial(self._come, world, use, group.ranks, group.timeout_s)
        self._answers.send(f"come-{use.group}", come)

    def _come(self, world: World, use: Use, ranks: tuple[int, ...], timeout_s: float) -> None:
        """Build what another rank uses. What goes wrong is told to who uses it."""
        until = Until(world.latch, time.monotonic() + timeout_s)
        with contextlib.suppress(LinkError, Interrupted):
            self._get(world, use, ranks, until, timeout_s=timeout_s)

    # --- ending -----------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Abort and drop everything, and wait until that has ended or gives no hope of it."""
        with self._lock:
            self._worlds.clear()
            worlds, self._inners = self._inners, {}
            over, self._over = self._over, []
        for inners in worlds.values():
            self._abort(inners, reason)
        self._drop([*over, *(inner for inners in worlds.values() for inner in inners.values())])
        settled = self._answers.settle(self._timeouts.handshake_s)
        if not (self._errands.settle(self._timeouts.handshake_s + 1) and settled):
            logger.warning("communicators do not end")

    def disown(self) -> None:
        """Close the copies of all sockets in a process forked from this one."""
        for inners in list(self._inners.values()):
            for inner in list(inners.values()):
                inner.disown()


def generation_of(fabric: str, address: str, wiring: Wiring, timeouts: Timeouts) -> Generation:
    """Return what a process has of them if this fabric carries its collectives."""
    return Generation(stocks(fabric, address), wiring, timeouts)


def _abandon(communicator: Communicator) -> None:
    """End a communicator that was built too late for anybody to want it."""
    communicator.abort()


def _abort_all(inners: Iterable[Inner], reason: str) -> None:
    for inner in inners:
        inner.abort(reason)


def _drop_all(inners: Iterable[Inner]) -> None:
    for inner in inners:
        inner.drop()
