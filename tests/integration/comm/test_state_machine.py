"""The communicator under any interleaving of moves, failures and collectives, on real sockets.

The machine is controller and script at once: it does only what these may do, in any order, and
knows what must come of it. Its ranks are fabrics in this process; see `crew`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import pathlib
import random
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from integration.comm.crew import (
    DEADLINE_S,
    EVERYBODY,
    KINDS,
    Call,
    Job,
    Rank,
    Threads,
    carry_out,
    is_ended,
    links_of,
    plan_of,
)
from tmover.comm.fabric import Mode
from tmover.comm.link import Link
from tmover.comm.world import CONTROL, VOTE, Lane, Peer, data_lane
from tmover.core.events import Plan
from tmover.errors import Interrupted, StateError

Pair = frozenset[Rank]
Lanes = dict[Peer, dict[Lane, Link]]
GROUPS = ("g0", "g1", "g2")
places = st.integers(0, 4)
some = st.frozensets(places, max_size=2)
kinds = st.sampled_from(KINDS)
counts = st.sampled_from((3, 3, 20_000, 300_000))
groups = st.sampled_from((EVERYBODY, *GROUPS))


def open_files() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def pairs_of(ranks: Iterable[Rank]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(ranks, 2)}


@dataclass
class Coming:
    """A world that is being prepared."""

    plan: Plan
    holders: list[Rank]
    relink: set[Pair]
    prepared: bool = False
    dead: bool = False
    """Whether it is revoked, or one of its ranks is lost: nobody can pass its barrier."""
    entered: bool = False
    """Whether anybody has stood in its barrier."""

    @property
    def epoch(self) -> int:
        return self.plan.epoch


class Machine(RuleBasedStateMachine):
    """See the module. `holders` have the ranks of the last world that anybody has entered."""

    # --- beginning --------------------------------------------------------------------------------

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.files = open_files()
        self.running = set(threading.enumerate())
        self.threads = Threads()
        self.everybody: list[Rank] = []
        self.holders: list[Rank] = []
        self.leavers: dict[int, Rank] = {}
        self.stuck: set[Rank] = set()
        """Those that have not passed the barrier that others have."""
        self.coming: Coming | None = None
        self.number = 0
        self.epoch = 0
        self.over: set[int] = set()
        self.broken = False
        self.connected: set[Pair] = set()
        self.suspects: set[Pair] = set()
        self.groups: dict[str, tuple[int, ...]] = {}
        self.serial = 0

    @initialize(size=st.integers(2, 5))
    def form(self, size: int) -> None:
        self.groups[EVERYBODY] = tuple(range(size))
        self.holders = [self.start(place) for place in range(size)]
        self.open(self.holders, set())
        self.pass_barrier()

    def start(self, place: int) -> Rank:
        rank = Rank(f"{'az'[len(self.everybody) % 2]}{len(self.everybody)}")
        self.everybody.append(rank)
        rank.take(place, self.groups)
        return rank

    # --- what is done often -----------------------------------------------------------------------

    def living(self, ranks: Iterable[Rank] | None = None) -> list[Rank]:
        return [rank for rank in (self.holders if ranks is None else ranks) if rank.alive]

    def enter_all(self) -> None:
        """Let everybody enter the world whose barrier he has passed."""
        for rank in self.holders:
            if rank.passed and rank.alive:
                rank.enter()

    def await_revocation(self) -> None:
        """Return when every rank of the present world has heard that it is over."""
        for rank in self.living():
            if rank.epoch == self.epoch:
                rank.await_revocation(self.epoch)
        self.broken = True

    def next_job(self, kind: str, group: str, count: int) -> Job:
        self.serial += 1
        known = group if group in self.groups else EVERYBODY
        return Job(kind, known, count, self.serial)

    def takers(self, what: Job) -> list[Rank]:
        """Return who takes part in a collective."""
        ranks = self.groups[EVERYBODY if what.kind in ("vote", "record") else what.group]
        return self.living(self.holders[place] for place in ranks)

    def give_up(self, ranks: Sequence[Rank] | None = None) -> None:
        """Roll the coming world back, in this order."""
        coming, self.coming = self.coming, None
        assert coming is not None
        self.over.add(coming.epoch)
        for rank in self.living(coming.holders if ranks is None else ranks):
            rank.give_up(coming.epoch)

    # --- collectives ------------------------------------------------------------------------------

    @precondition(lambda self: not self.stuck)
    @rule(kind=kinds, group=groups, count=counts, inside=st.booleans())
    def work(self, kind: str, group: str, count: int, *, inside: bool) -> None:
        """All do a collective; whoever has passed a barrier enters the world first."""
        what = self.next_job(kind, group, count)
        takers = self.takers(what)
        if self.coming is not None and self.coming.entered:
            self.give_up()
        for rank in takers:
            rank.fabric.attempt_open = inside
        calls = [functools.partial(self.enter_and_work, rank, what) for rank in takers]
        for rank, outcome in zip(takers, self.threads.together(calls), strict=True):
            assert self.broken or outcome is True, f"{rank}: {outcome} of {what}"
            if self.broken and (not inside or kind in ("vote", "record")):
                assert is_ended(outcome)
        self.enter_all()

    @staticmethod
    def enter_and_work(rank: Rank, what: Job) -> bool:
        if rank.passed:
            rank.enter()
        return carry_out(rank, what)

    @precondition(lambda self: not self.stuck and not self.broken)
    @rule(kind=kinds, group=groups, count=counts, inside=st.booleans(), away=places, by=places)
    def work_is_revoked(
        self, kind: str, group: str, count: int, away: int, by: int, *, inside: bool
    ) -> None:
        """One rank never comes to a collective, and somebody revokes the epoch."""
        if self.coming is not None and self.coming.entered:
            self.give_up()
        self.enter_all()
        what = self.next_job(kind, group, count)
        takers = self.takers(what)
        del takers[away % len(takers)]
        for rank in takers:
            rank.fabric.attempt_open = inside
        revoking = self.living()[by % len(self.living())].fabric
        calls: list[Call] = [functools.partial(carry_out, rank, what) for rank in takers]
        self.threads.together([*calls, lambda: revoking.revoke(self.epoch, "said by one")])
        self.await_revocation()

    # --- preparing --------------------------------------------------------------------------------

    @rule(leaving=some, pair=st.none() | st.tuples(places, places), first=st.booleans(),
          meanwhile=st.none() | st.tuples(kinds, groups, counts))  # fmt: skip
    def prepare(
        self,
        leaving: frozenset[int],
        pair: tuple[int, int] | None,
        meanwhile: tuple[str, str, int] | None,
        *,
        first: bool,
    ) -> None:
        """Prepare a world, with joiners for some ranks, while the present one goes on."""
        joiners = self.make_way(leaving, first=first)
        ends = {self.holders[place % len(self.holders)] for place in pair or ()}
        relink = {frozenset(ends)} if len(ends) == 2 else set()
        holders = [joiners.get(place, rank) for place, rank in enumerate(self.holders)]
        for joiner in joiners.values():
            joiner.take(holders.index(joiner), self.groups)
        beside: list[Call] = []
        if meanwhile is not None and not self.stuck and not self.broken:
            what = self.next_job(*meanwhile)
            beside = [functools.partial(carry_out, r, what) for r in self.takers(what)]
        self.open(holders, relink, beside)

    def make_way(self, leaving: frozenset[int], *, first: bool) -> dict[int, Rank]:
        """Give up what was coming; return who takes which place in what comes now.

        Its members hear of it either `first`, or by what they are to prepare next.
        """
        self.enter_all()
        old = self.coming
        if old is not None:
            stays = [rank for rank in old.holders if rank in self.holders]
            others = [rank for rank in old.holders if rank not in stays]
            self.give_up(old.holders if first or old.entered else others)
        idle = [] if old is None else [r for r in self.living(old.holders) if r.epoch == 0]
        joiners = {}
        for place, rank in enumerate(self.holders):
            if rank.alive and (place not in leaving or self.stuck):
                continue
            back = self.leavers.get(place)
            if not rank.alive and back is not None and back.alive:
                joiners[place] = back
            else:
                joiners[place] = idle.pop() if idle else self.start(place)
        return joiners

    def open(self, holders: list[Rank], relink: set[Pair], beside: Sequence[Call] = ()) -> None:
        """Let all prepare the next epoch, and see what they have opened."""
        self.number += 1
        plan = plan_of(self.number, holders)
        relink = (relink | self.suspects) & pairs_of(holders)
        pairs = [(one.uid, two.uid) for one, two in relink]
        before = {rank: {p: dict(p.lanes) for p in rank.known().values()} for rank in holders}
        prepares = [
            functools.partial(rank.fabric.prepare, plan, timeout_s=DEADLINE_S, relink=pairs)
            for rank in holders
        ]
        outcomes = self.threads.together([*prepares, *beside])
        assert not any(map(is_ended, outcomes)), outcomes
        assert False not in outcomes
        self.coming = Coming(plan, holders, relink, prepared=True)
        for rank in holders:
            rank.ready = plan.epoch
            self.look_at_opened(rank, before[rank], idle=not beside)

    def look_at_opened(self, rank: Rank, before: Lanes, *, idle: bool) -> None:
        """Only those are connected to that were not, or are to be connected to afresh."""
        assert self.coming is not None
        world = rank.fabric.worlds.ready(self.coming.epoch)
        assert world is not None
        fresh = {peer.uid for peer in world.fresh}
        expected = {
            other.uid
            for other in self.coming.holders
            if other is not rank
            and ({rank, other} not in self.connected or {rank, other} in self.coming.relink)
        }
        assert fresh == expected, f"{rank} has connected to {fresh}, not to {expected}"
        for peer in world.peers.values():
            lanes = before.get(peer)
            if lanes is not None:
                assert lanes.items() <= peer.lanes.items()
                assert not idle or lanes == peer.lanes

    @precondition(lambda self: not self.stuck)
    @rule(place=places, late=some)
    def prepare_with_some_late(self, place: int, late: frozenset[int]) -> None:
        """Some prepare, others do not come; it is given up, and they come when it is."""
        joiners = self.make_way(frozenset({place % len(self.holders)}), first=True)
        holders = [joiners.get(place, rank) for place, rank in enumerate(self.holders)]
        for joiner in joiners.values():
            joiner.take(holders.index(joiner), self.groups)
        self.number += 1
        plan = plan_of(self.number, holders)
        missing = [holders[p % len(holders)] for p in late or {place}]
        there = [rank for rank in holders if rank not in missing]
        prepare = [
            functools.partial(rank.fabric.prepare, plan, timeout_s=DEADLINE_S) for rank in there
        ]
        give_up = [functools.partial(rank.give_up, plan.epoch) for rank in there]
        self.threads.together([*prepare, *give_up])  # or a peer that has heard of it refuses
        self.over.add(plan.epoch)
        calls = [functools.partial(r.fabric.prepare, plan, timeout_s=0.01) for r in missing]
        for rank, outcome in zip(missing, self.threads.together(calls), strict=True):
            rank.ready = 0  # a leaver that comes back may have prepared for what was given up
            if outcome is None:  # it lacked no link
                rank.give_up(plan.epoch)

    # --- the barrier ------------------------------------------------------------------------------

    def barrier(self, rank: Rank) -> bool:
        """Stand in the barrier of the coming world; return whether it was passed."""
        assert self.coming is not None
        said = [b"%d" % place * 10_000 for place in range(len(self.coming.holders))]
        place = self.coming.holders.index(rank)
        assert rank.fabric.barrier(self.coming.epoch, said[place]) == said
        return True

    def pass_barrier(self, dying: Rank | None = None) -> None:
        coming = self.coming
        assert coming is not None
        if dying is not None:
            here = coming.holders[0].fabric
            here.on_halfway = lambda _kind: dying.end(bye=False)
        calls = [functools.partial(self.barrier, rank) for rank in coming.holders]
        outcomes = self.threads.together(calls)
        coming.holders[0].fabric.on_halfway = None
        assert all(outcome is True for outcome in outcomes), outcomes
        self.advance(coming)
        for rank in self.holders:
            rank.passed = True
        self.connected |= pairs_of(self.holders)
        self.suspects -= pairs_of(self.holders)

    def advance(self, coming: Coming) -> None:
        """Note that there is a next world."""
        for place, (old, new) in enumerate(zip(self.holders, coming.holders, strict=True)):
            if old is not new:
                self.leavers.pop(place, None)
                if old.alive:
                    self.leavers[place] = old
        self.holders, self.epoch, self.coming = coming.holders, coming.epoch, None
        self.broken, self.stuck = False, set()

    @precondition(lambda self: self.coming is not None and not self.coming.dead)
    @rule(dies=st.booleans())
    def switch(self, *, dies: bool) -> None:
        """All pass; perhaps a leaver dies while they stand there."""
        assert self.coming is not None
        leavers = [r for r in self.living() if r not in self.coming.holders]
        self.pass_barrier(leavers[0] if dies and leavers else None)

    @precondition(lambda self: self.coming is not None and not self.coming.dead)
    @rule(inside=st.frozensets(places, max_size=4), by=places)
    def barrier_is_revoked(self, inside: frozenset[int], by: int) -> None:
        """Some stand in the barrier, another never comes and revokes the epoch."""
        coming = self.coming
        assert coming is not None
        revoking = coming.holders[by % len(coming.holders)]
        there = {coming.holders[place % len(coming.holders)] for place in inside} - {revoking}
        waits = [functools.partial(self.barrier, rank) for rank in coming.holders if rank in there]
        *outcomes, _ = self.threads.together(
            [*waits, lambda: revoking.fabric.revoke(coming.epoch, "said by one")]
        )
        assert all(map(is_ended, outcomes)), outcomes
        self.note_dead(coming)
        coming.entered = coming.entered or bool(there)

    def note_dead(self, coming: Coming) -> None:
        for rank in self.living(coming.holders):
            rank.await_revocation(coming.epoch)
        coming.dead = True

    @precondition(lambda self: self.coming is not None and self.coming.dead)
    @rule()
    def barrier_of_the_dead(self) -> None:
        """Nobody passes the barrier of a revoked world, or of one that lacks a rank."""
        coming = self.coming
        assert coming is not None
        calls = [functools.partial(self.barrier, rank) for rank in self.living(coming.holders)]
        outcomes = self.threads.together(calls)
        assert all(map(is_ended, outcomes)), outcomes
        self.note_dead(coming)
        coming.entered = True

    @precondition(lambda self: self.coming is not None and not self.coming.dead)
    @rule(place=places, dies=st.booleans())
    def barrier_passed_by_one(self, place: int, *, dies: bool) -> None:
        """One rank has told only the next when it dies, or revokes: that one passes, no other."""
        coming = self.coming
        assert coming is not None
        halting = coming.holders[place % len(coming.holders)]
        following = coming.holders[(place + 1) % len(coming.holders)]
        through = threading.Event()

        def halt(_kind: object) -> None:
            assert through.wait(DEADLINE_S)
            if dies:
                self.die(halting)
            else:
                halting.fabric.revoke(coming.epoch, "said by one")

        def follow() -> None:
            self.barrier(following)
            through.set()

        halting.fabric.on_halfway = halt
        others = [rank for rank in coming.holders if rank is not following]
        calls = [functools.partial(self.barrier, rank) for rank in others]
        *outcomes, passed = self.threads.together([*calls, follow])
        halting.fabric.on_halfway = None
        assert all(map(is_ended, outcomes)), outcomes
        assert not is_ended(passed)
        self.note_dead(coming)
        self.advance(coming)
        # of what was opened for this world, one end is used and the other will be closed
        self.suspects |= {frozenset({following, r}) for r in others} - self.connected
        self.suspects |= coming.relink
        self.stuck = set(self.living(others))
        following.passed = True
        following.enter()
        self.broken = True

    # --- giving up, releasing, losing -------------------------------------------------------------

    @precondition(lambda self: self.coming is not None)
    @rule(order=st.randoms(use_true_random=False))
    def abort(self, order: random.Random) -> None:
        """Roll the coming world back; more than once does no harm."""
        assert self.coming is not None
        ranks = [*self.coming.holders, *self.coming.holders]
        order.shuffle(ranks)
        self.give_up(ranks)

    @precondition(lambda self: not self.stuck)
    @rule(order=st.randoms(use_true_random=False), early=st.booleans())
    def release(self, order: random.Random, *, early: bool) -> None:
        """All have passed: the leavers go, and nothing is left of the worlds before."""
        self.enter_all()
        needed = [] if self.coming is None else self.coming.holders
        leavers = [rank for rank in self.leavers.values() if rank.alive and rank not in needed]
        ranks = self.living()
        order.shuffle(ranks)
        if early:
            for leaver in leavers:
                leaver.end(bye=True)
        for rank in ranks:
            rank.fabric.release(self.epoch)
            rank.fabric.release(self.epoch)
        for leaver in leavers:
            leaver.end(bye=True)
        for rank in ranks:
            self.look_at_links(rank)

    def look_at_links(self, rank: Rank) -> None:
        """A rank holds no link that neither the present nor the coming world uses."""
        worlds = rank.fabric.worlds
        used = links_of(peer for world in worlds.all() for peer in world.peers.values())
        kept = links_of(worlds._remains.peers)
        assert rank.open_links() - used <= kept
        assert not kept or self.coming is not None

    @rule(by=places, coming=st.booleans())
    def revoke(self, by: int, *, coming: bool) -> None:
        """One says that a world is over; all hear it from one another."""
        if coming and self.coming is not None:
            ranks = self.living(self.coming.holders)
            if not ranks:
                return
            ranks[by % len(ranks)].fabric.revoke(self.coming.epoch, "said by one")
            self.note_dead(self.coming)
        elif not self.stuck:
            passed = [rank for rank in self.living() if rank.passed]
            ranks = passed or self.living()
            ranks[by % len(ranks)].fabric.revoke(self.epoch, "said by one")
            for rank in passed:
                rank.await_revocation(self.epoch)
            self.enter_all()
            self.await_revocation()

    @rule(place=places)
    def lose(self, place: int) -> None:
        """A rank dies, unless it is the last."""
        self.enter_all()
        coming = [] if self.coming is None else self.coming.holders
        ranks = list(dict.fromkeys(self.living([*self.holders, *coming, *self.leavers.values()])))
        lost = ranks[place % len(ranks)]
        if self.living() == [lost] or (
            self.stuck and self.living(set(self.holders) - self.stuck) == [lost]
        ):
            return
        self.die(lost)
        if lost in self.holders and not self.stuck:
            if self.coming is not None and self.coming.entered:
                self.give_up()  # who stands in a barrier minds the links before it only then
            self.await_revocation()

    def die(self, lost: Rank) -> None:
        lost.end(bye=False)
        self.connected = {pair for pair in self.connected if lost not in pair}
        if self.coming is not None and lost in self.coming.holders:
            self.coming.dead = True

    @precondition(lambda self: not self.stuck and not self.broken)
    @rule(first=places, second=places, lane=st.sampled_from(("control", "vote", "data")))
    def cut(self, first: int, second: int, lane: str) -> None:
        """A link between two ranks breaks, under a collective that needs it."""
        if self.coming is not None and self.coming.entered:
            self.give_up()
        self.enter_all()
        one, two = (self.holders[place % len(self.holders)] for place in (first, second))
        peer = one.known().get(two.uid)
        lanes = {"control": CONTROL, "vote": VOTE, "data": data_lane(EVERYBODY)}
        if peer is None or lanes[lane] not in peer.lanes:
            return
        self.suspects.add(frozenset({one, two}))
        peer.lanes[lanes[lane]].sock.shutdown(socket.SHUT_RDWR)
        what = self.next_job("vote" if lane == "vote" else "barrier", EVERYBODY, 3)
        for rank in self.holders:
            rank.fabric.attempt_open = False
        calls = [functools.partial(carry_out, rank, what) for rank in self.holders]
        outcomes = dict(zip(self.holders, self.threads.together(calls), strict=True))
        if lane != "control":  # who has no part in it may have heard everybody in time
            assert is_ended(outcomes[one])
            assert is_ended(outcomes[two])
        self.await_revocation()
        if self.coming is not None and {one, two} <= set(self.coming.holders):
            self.give_up()  # it would share the broken link

    @precondition(lambda self: len(self.groups) <= len(GROUPS))
    @rule(ranks=st.frozensets(places, min_size=1))
    def new_group(self, ranks: frozenset[int]) -> None:
        """The script makes a group; whoever is not in the world has made it in its rehearsal."""
        size = len(self.holders)
        name = GROUPS[len(self.groups) - 1]
        self.groups[name] = tuple(sorted({place % size for place in ranks}))
        for rank in self.living([*self.holders, *(self.coming.holders if self.coming else ())]):
            rank.take(rank.place, self.groups)

    # --- late and repeated ------------------------------------------------------------------------

    @rule(place=places, back=st.integers(0, 3))
    def repeat(self, place: int, back: int) -> None:
        """What comes late, twice or never was prepared changes nothing."""
        ranks = self.living()
        rank = ranks[place % len(ranks)]
        fabric, old = rank.fabric, self.number - back
        if old in rank.over or old < max(rank.epoch, rank.ready):
            with pytest.raises(Interrupted):
                fabric.prepare(plan_of(old, self.holders), timeout_s=DEADLINE_S)
        if old <= 0 or old != rank.ready:
            with pytest.raises(StateError):
                fabric.commit(old)
            with pytest.raises(Interrupted):
                fabric.barrier(old)
        if old <= rank.epoch:
            fabric.rollback(old)
        if old < rank.epoch:
            fabric.revoke(old, "late")
            fabric.release(old)

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def everybody_is_where_he_should_be(self) -> None:
        for rank in self.living(self.everybody):
            fabric = rank.fabric
            assert fabric.fault is None
            assert fabric.epoch == rank.epoch
            assert rank.epoch not in self.over
            assert bool(rank.ready) is bool(fabric.worlds.ready(rank.ready))
            if rank in self.holders and rank.epoch == self.epoch:
                assert fabric.mode is (Mode.REVOKED if self.broken else Mode.LIVE)
            if rank.epoch == 0:
                assert fabric.mode is Mode.SANDBOX

    @invariant()
    def nobody_is_accused_whose_links_are_sound(self) -> None:
        broken = {frozenset(r.uid for r in pair) for pair in self.suspects}
        dead = {rank.uid for rank in self.everybody if not rank.alive}
        for rank in self.everybody:
            for epoch, peers, reason in rank.accused:
                for peer in peers:
                    assert peer in dead or {rank.uid, peer} in broken, (rank, epoch, peer, reason)
            rank.accused.clear()

    def teardown(self) -> None:
        for rank in self.living(self.everybody):
            rank.end(bye=True)
        self.threads.close()
        if sys.exc_info()[1] is not None:
            return
        left = set(threading.enumerate()) - self.running
        assert not left, f"threads are left: {left}"
        self.everybody.clear()
        gc.collect()
        assert open_files() == self.files


class MachineAtLength(Machine):
    """The same, for longer."""


Machine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=15, suppress_health_check=list(HealthCheck)
)
MachineAtLength.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestMachine = pytest.mark.timeout(600)(Machine.TestCase)  # a busy machine takes long
TestMachineAtLength = pytest.mark.full(pytest.mark.timeout(3600)(MachineAtLength.TestCase))
