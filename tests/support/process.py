"""One simulated rank: what `core.rank` decides, with a mailbox where the real one has sockets.

A rank is a little machine that is moved by what is delivered to it: frames of other ranks, orders of
its agent, and its own turns. It computes with numbers instead of tensors: a step's gradient is a hash of the
model and of every rank's private records, so that an update applied twice, left out, or made from
stale gradients or another rank's records shows in the model for ever.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tmover.core import rank as rules
from tmover.core.events import (
    Abort,
    AnyOrder,
    Arm,
    Assign,
    Broken,
    Done,
    Entered,
    Finished,
    FromAgent,
    Looping,
    Passed,
    Plan,
    Prepare,
    Prepared,
    PrepareFailed,
    Reported,
    Revoke,
    Start,
    Verified,
    Warm,
)
from tmover.core.rank import Rank, Resolution, Verdict, Vote

SCHEMA = {"model": "m"}
NOTHING = 0


def mixed(*parts: int) -> int:
    """Return a number that depends on all parts and their order."""
    value = 0x345678
    for part in parts:
        value = (value ^ part) * 0x9E3779B1 % (1 << 61)
        value ^= value >> 29
    return value + 1


class Stage(enum.Enum):
    """What the main thread of the rank's script is doing."""

    LAUNCHED = "up, and told nothing yet"
    BUILDING = "in its first world, before the loop"
    IDLE = "between two steps"
    REDUCING = "exchanging gradients"
    KEEPING = "waiting for the records it keeps"
    VOTING = "waiting for votes"
    LEFT = "has handed its state over"
    HELD = "waiting for a decision"
    RECEIVING = "waiting for state"
    CROSSING = "waiting for the records it keeps, before a barrier"
    BARRIER = "waiting for barrier messages"
    FINISHED = "at the end of the script"
    STANDBY = "warm, or rehearsing"
    DEAD = "gone"


class Kind(enum.Enum):
    """What a frame between two ranks carries."""

    DATA = "data"
    RECORD = "record"
    VOTE = "vote"
    BARRIER = "barrier"
    REVOKE = "revoke"
    HALF_STATE = "the first half of a state"
    STATE = "the rest of a state"
    END = "the process at the other end is gone"
    CUT = "the link broke, both ends live"


class Frame(NamedTuple):
    """Something on a link."""

    kind: Kind
    epoch: int = 0
    step: int = 0
    body: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of a step."""

    step: int
    record: int
    """This rank's records after the step."""
    gradient: int = NOTHING


class Outside:
    """What a process needs of the world around it."""

    send: Callable[[Process, str, Frame], None]
    tell: Callable[[Process, FromAgent], None]
    work: Callable[[Process], None]
    is_up: Callable[[str], bool]
    applied: Callable[[Process, int, int], None]
    crash: Callable[[Process], None]


class Process:
    """One worker process."""

    def __init__(self, uid: str, launch: int, total: int, outside: Outside) -> None:
        self.uid = uid
        self.launch = launch
        self.total = total
        self.out = outside
        self.stage = Stage.LAUNCHED
        self.rank = Rank()
        self.world: Plan | None = None
        self.prepare: Prepare | None = None
        self.order: Assign | None = None
        """The assignment that is being carried out, or the last one."""
        self.target: Plan | None = None
        """The world this rank is crossing into, or has handed over to."""
        self.model = mixed(NOTHING)
        self.record = NOTHING
        self.kept: dict[int, int] = {}
        """The records of this rank's ward, by step."""
        self.attempt: Attempt | None = None
        self.mail: dict[tuple[Kind, int], dict[str, list[Frame]]] = {}
        self.broken: set[str] = set()
        """Endpoints of peers whose link is known to be broken."""
        self.accused: set[int] = set()
        self.passed_on: set[int] = set()
        self.will_refuse = False

    def __repr__(self) -> str:
        return f"{self.uid}#{self.launch} {self.stage.name} {self.rank}"

    # --- small things -----------------------------------------------------------------------------

    @property
    def job(self) -> str:
        return "j"

    def number(self, plan: Plan) -> int:
        found = plan.rank_of(self.uid)
        assert found is not None, (self, plan)
        return found

    def keeper(self, plan: Plan, nproc: int) -> str | None:
        size = len(plan.members)
        return None if size == nproc else plan.member((self.number(plan) + nproc) % size).worker

    def ward(self, plan: Plan, nproc: int) -> str | None:
        size = len(plan.members)
        return None if size == nproc else plan.member((self.number(plan) - nproc) % size).worker

    def others(self, plan: Plan) -> list[str]:
        return [m.worker for m in plan.members if m.worker != self.uid]

    def post(self, plan: Plan, frame: Frame) -> None:
        for peer in self.others(plan):
            self.out.send(self, peer, frame)

    def unreachable(self, plan: Plan) -> list[str]:
        """Return the members of `plan` to which no link can be opened."""
        return [m.worker for m in plan.members if not self.out.is_up(m.endpoint)]

    def have(self, kind: Kind, epoch: int, peers: Iterable[str]) -> bool:
        box = self.mail.get((kind, epoch), {})
        return all(box.get(peer) for peer in peers)

    def take(self, kind: Kind, epoch: int, peer: str) -> Frame:
        return self.mail[kind, epoch][peer].pop(0)


class Worker(Process):
    """A process with its rules."""

    def __init__(
        self, uid: str, launch: int, total: int, outside: Outside, *, sandbox: bool, nproc: int
    ) -> None:
        super().__init__(uid, launch, total, outside)
        self.nproc = nproc
        if sandbox:
            self.stage = Stage.STANDBY
            self.rank = Rank(step=None)
            self.model = self.record = NOTHING

    # --- orders -----------------------------------------------------------------------------------

    def hear(self, order: AnyOrder) -> None:
        match order:
            case Start(plan=plan):
                self.form(plan)
            case Prepare():
                self.get_ready(order)
            case Arm(epoch=epoch):
                if self.prepare is not None and self.prepare.plan.epoch == epoch:
                    self.rank = rules.arm(self.rank, epoch)
            case Abort(epoch=epoch):
                self.abort(epoch)
            case Revoke(epoch=epoch):
                self.revoke(epoch)
                self.report(epoch)
            case Assign():
                self.assign(order)
            case Done():
                pass
        self.run()

    def form(self, plan: Plan) -> None:
        if self.stage is not Stage.LAUNCHED or plan.epoch in self.rank.revoked:
            return
        self.world = plan
        self.rank = rules.start(self.rank, plan.epoch)
        self.stage = Stage.BUILDING
        self.out.work(self)
        self.look(plan)

    def get_ready(self, order: Prepare) -> None:
        epoch = order.plan.epoch
        if epoch <= self.rank.epoch or epoch in self.rank.revoked:
            return
        if self.stage not in (
            Stage.STANDBY,
            Stage.IDLE,
            Stage.REDUCING,
            Stage.KEEPING,
            Stage.VOTING,
            Stage.HELD,
            Stage.LEFT,
            Stage.CROSSING,
            Stage.BARRIER,
            Stage.FINISHED,
        ):
            return  # fmt: skip
        dead = self.unreachable(order.plan)
        if dead:
            reason = f"cannot reach {dead}"
            self.out.tell(
                self, PrepareFailed(job=self.job, worker=self.uid, epoch=epoch, reason=reason)
            )
            return
        self.prepare = order
        self.out.tell(self, Prepared(job=self.job, worker=self.uid, epoch=epoch))

    def abort(self, epoch: int) -> None:
        self.rank = rules.abort(self.rank, epoch)
        if self.rank.entered == epoch:
            return
        if self.prepare is not None and self.prepare.plan.epoch == epoch:
            self.prepare = None
        if self.target is not None and self.target.epoch == epoch:
            self.target = None
            if self.rank.epoch == 0:
                self.stage = Stage.STANDBY
            elif not self.rank.interrupted:
                self.resume()

    def assign(self, order: Assign) -> None:
        epoch = order.plan.epoch
        if epoch <= self.rank.epoch or epoch in self.rank.revoked or self.order == order:
            return
        if self.stage in (Stage.LAUNCHED, Stage.BUILDING) or order.plan.rank_of(self.uid) is None:
            raise AssertionError((self, order))
        if self.world is not None:
            self.rank = rules.revoke(self.rank, self.rank.epoch)
        self.order, self.target, self.prepare = order, order.plan, None
        again = {peer for pair in order.relink if self.uid in pair for peer in pair}
        self.broken -= {m.endpoint for m in order.plan.members if m.worker in again}
        self.stage = Stage.RECEIVING
        if not self.look(order.plan) or self.uid in order.sources:
            return
        self.reach(order.step)
        self.send_states(order.plan, order.sources, order.step)
        self.cross(order.plan)

    def reach(self, step: int) -> None:
        match rules.resolve(self.rank, step):
            case Resolution.APPLY:
                self.apply()
                self.rank = rules.applied(self.rank, step)
            case Resolution.REDO:
                pass
            case Resolution.RECEIVE:
                raise AssertionError(f"{self} cannot stand at {step}")
        self.attempt = None

    # --- frames -----------------------------------------------------------------------------------

    def receive(self, peer: str, frame: Frame) -> None:
        if frame.kind in (Kind.END, Kind.CUT):
            self.broken.add(f"{peer}:{frame.step}")
            self.look_around()
        elif frame.kind is Kind.REVOKE:
            if frame.epoch in (self.rank.epoch, self.target.epoch if self.target else 0):
                self.revoke(frame.epoch)
                self.report(frame.epoch)
        elif frame.epoch >= self.rank.epoch and frame.epoch not in self.rank.revoked:
            box = self.mail.setdefault((frame.kind, frame.epoch), {})
            box.setdefault(peer, []).append(frame)
        self.run()

    def look_around(self) -> None:
        """Notice broken links where the main thread is looking."""
        if self.stage in (
            Stage.BUILDING, Stage.IDLE, Stage.REDUCING, Stage.KEEPING, Stage.VOTING, Stage.FINISHED,
        ):  # fmt: skip
            assert self.world is not None
            self.look(self.world)
        elif self.stage in (Stage.RECEIVING, Stage.CROSSING, Stage.BARRIER, Stage.LEFT):
            assert self.target is not None
            self.look(self.target)

    def look(self, plan: Plan) -> bool:
        """Return whether all links of `plan` are whole; accuse the other ends if not."""
        peers = tuple(m.worker for m in plan.members if m.endpoint in self.broken)
        if plan is not self.world:
            peers = tuple(dict.fromkeys([*peers, *self.unreachable(plan)]))
        if not peers or plan.epoch in self.rank.revoked:
            return not peers
        if plan.epoch not in self.accused:
            self.accused.add(plan.epoch)
            self.out.tell(
                self,
                Broken(job=self.job, worker=self.uid, epoch=plan.epoch, peers=peers, reason="eof"),
            )
        self.revoke(plan.epoch)
        self.report(plan.epoch)
        return False

    # --- revocation -------------------------------------------------------------------------------

    def revoke(self, epoch: int) -> None:
        self.rank = rules.revoke(self.rank, epoch)
        if epoch not in self.rank.revoked:
            return
        for plan in (self.world, self.target):
            if plan is not None and plan.epoch == epoch and epoch not in self.passed_on:
                self.passed_on.add(epoch)
                self.post(plan, Frame(Kind.REVOKE, epoch))
        if self.target is not None and self.target.epoch == epoch:
            if self.stage in (Stage.RECEIVING, Stage.CROSSING, Stage.BARRIER):
                self.stage = Stage.HELD if self.rank.epoch else Stage.STANDBY
        elif epoch == self.rank.epoch and self.stage in (
            Stage.BUILDING, Stage.IDLE, Stage.REDUCING, Stage.KEEPING, Stage.VOTING, Stage.FINISHED,
        ):  # fmt: skip
            self.stage = Stage.HELD

    def report(self, of: int) -> None:
        self.out.tell(
            self,
            Reported(
                job=self.job,
                worker=self.uid,
                of=of,
                epoch=self.rank.epoch,
                step=self.rank.step,
                doubt=self.rank.doubt,
            ),
        )

    # --- turns ------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do the part of the script that takes time."""
        match self.stage:
            case Stage.BUILDING:
                self.stage = Stage.IDLE
                self.out.tell(
                    self,
                    Looping(job=self.job, worker=self.uid, launch=self.launch, schema=SCHEMA),
                )
                self.out.work(self)
            case Stage.STANDBY if self.rank.epoch == 0 and self.target is None:
                self.out.tell(
                    self, Warm(job=self.job, worker=self.uid, launch=self.launch, schema=SCHEMA)
                )
            case Stage.IDLE:
                self.compute()
        self.run()

    def compute(self) -> None:
        assert self.world is not None and self.rank.step is not None
        step = self.rank.step + 1
        if self.attempt is not None and self.attempt.step == step:
            self.attempt = None
        number = self.number(self.world)
        self.attempt = Attempt(step=step, record=mixed(self.record, number, step))
        self.stage = Stage.REDUCING
        data = mixed(self.model, step, self.record)
        self.mail.setdefault((Kind.DATA, self.rank.epoch), {})
        self.post(self.world, Frame(Kind.DATA, self.rank.epoch, step, (data,)))

    def run(self) -> None:
        """Go on as far as what was delivered allows."""
        before = None
        while self.stage is not before:
            before = self.stage
            match self.stage:
                case Stage.REDUCING:
                    self.reduce()
                case Stage.KEEPING:
                    self.vote()
                case Stage.VOTING:
                    self.count()
                case Stage.RECEIVING | Stage.STANDBY:
                    self.load()
                case Stage.CROSSING:
                    self.enter()
                case Stage.BARRIER:
                    self.leave()

    def reduce(self) -> None:
        assert self.world is not None and self.attempt is not None
        epoch, others = self.rank.epoch, self.others(self.world)
        if not self.have(Kind.DATA, epoch, others):
            return
        data = {peer: self.take(Kind.DATA, epoch, peer).body[0] for peer in others}
        data[self.uid] = mixed(self.model, self.attempt.step, self.record)
        gradient = mixed(*(data[m.worker] for m in self.world.members))
        self.attempt = dataclasses.replace(self.attempt, gradient=gradient)
        self.stage = Stage.KEEPING
        self.deposit(self.world, self.attempt.step, self.attempt.record)

    def deposit(self, plan: Plan, step: int, record: int) -> None:
        keeper = self.keeper(plan, self.nproc)
        if keeper is not None:
            self.out.send(self, keeper, Frame(Kind.RECORD, plan.epoch, step, (record,)))

    def keeps(self, plan: Plan) -> bool:
        """Take the ward's records; return whether they have come."""
        ward = self.ward(plan, self.nproc)
        if ward is None:
            return True
        if not self.have(Kind.RECORD, plan.epoch, [ward]):
            return False
        frame = self.take(Kind.RECORD, plan.epoch, ward)
        self.kept = {s: r for s, r in self.kept.items() if s >= frame.step - 1}
        self.kept[frame.step] = frame.body[0]
        return True

    def vote(self) -> None:
        assert self.world is not None and self.attempt is not None
        if not self.keeps(self.world):
            return
        good, self.will_refuse = not self.will_refuse, False
        self.rank, vote = rules.cast(self.rank, self.attempt.step, good=good)
        self.stage = Stage.VOTING
        body = (vote.step, int(vote.good), vote.armed)
        self.post(self.world, Frame(Kind.VOTE, self.rank.epoch, vote.step, body))
        self.mine = vote

    def count(self) -> None:
        assert self.world is not None and self.attempt is not None
        epoch, others = self.rank.epoch, self.others(self.world)
        if not self.have(Kind.VOTE, epoch, others):
            return
        bodies = [self.take(Kind.VOTE, epoch, peer).body for peer in others]
        votes = [Vote(step, bool(good), armed) for step, good, armed in bodies]
        self.rank, verdict, switch = rules.tally(self.rank, [self.mine, *votes])
        if verdict is Verdict.BROKEN:
            raise AssertionError(f"{self} counts in a revoked epoch")
        if verdict is Verdict.REFUSED:
            self.resume()
            return
        self.apply()
        step = self.attempt.step
        if switch and step < self.total - 1:
            self.boundary(switch)
        else:
            self.resume()

    def apply(self) -> None:
        assert self.attempt is not None
        self.model = mixed(self.model, self.attempt.gradient)
        self.record = self.attempt.record
        self.out.applied(self, self.attempt.step, self.model)

    def resume(self) -> None:
        """Go on training, or rest at the end."""
        if self.rank.step == self.total - 1:
            self.stage = Stage.FINISHED
            self.out.tell(self, Finished(job=self.job, worker=self.uid, step=self.total - 1))
        else:
            self.stage = Stage.IDLE
            self.out.work(self)
        self.look_around()

    # --- switching --------------------------------------------------------------------------------

    def boundary(self, epoch: int) -> None:
        """All have voted to switch to `epoch` here."""
        order, step = self.prepare, self.rank.step
        is_over = epoch in self.rank.revoked
        if order is None or order.plan.epoch != epoch or is_over or step is None:
            self.resume()
            return
        self.out.tell(self, Entered(job=self.job, worker=self.uid, epoch=epoch, step=step))
        self.target = order.plan
        if order.plan.rank_of(self.uid) is None:
            self.stage = Stage.LEFT
            self.send_states(order.plan, order.sources, step)
            self.look(order.plan)
        elif self.look(order.plan):
            self.cross(order.plan)
        else:
            self.stage = Stage.HELD

    def send_states(self, plan: Plan, sources: dict[str, str], step: int) -> None:
        for peer in [peer for peer, source in sources.items() if source == self.uid]:
            number = plan.rank_of(peer)
            assert number is not None
            assert self.world is not None or self.rank.epoch == 0
            if self.world is not None and self.world.member(number).worker == self.uid:
                record: int | None = self.record
            elif self.ward(plan, self.nproc) == peer:
                record = self.kept.get(step)
            else:
                record = None
            self.out.send(self, peer, Frame(Kind.HALF_STATE, plan.epoch, step))
            body = (self.model,) if record is None else (self.model, record)
            self.out.send(self, peer, Frame(Kind.STATE, plan.epoch, step, body))

    def load(self) -> None:
        """Take the state that this rank is to have in its next world."""
        if self.stage is Stage.RECEIVING and self.order is not None:
            plan, sources = self.order.plan, self.order.sources
        elif self.prepare is not None and self.prepare.plan.rank_of(self.uid) is not None:
            plan, sources = self.prepare.plan, self.prepare.sources
        else:
            return
        if plan.epoch in self.rank.revoked or self.uid not in sources:
            return
        source = sources[self.uid]
        if self.have(Kind.HALF_STATE, plan.epoch, [source]):
            self.rank = rules.emptied(self.rank)
            self.model = self.record = NOTHING
        if not self.have(Kind.STATE, plan.epoch, [source]):
            return
        frame = self.take(Kind.STATE, plan.epoch, source)
        if len(frame.body) < 2:
            self.out.crash(self)
            return
        self.model, self.record = frame.body
        self.target, self.attempt, self.kept = plan, None, {}
        self.rank = rules.applied(self.rank, frame.step)
        self.out.applied(self, frame.step, self.model)
        self.out.tell(
            self, Verified(job=self.job, worker=self.uid, epoch=plan.epoch, step=frame.step)
        )
        if self.stage is Stage.RECEIVING and self.order is not None:
            self.send_states(plan, self.order.sources, frame.step)
        if self.look(plan):
            self.cross(plan)
        else:
            self.stage = Stage.HELD if self.rank.epoch else Stage.STANDBY

    def cross(self, plan: Plan) -> None:
        assert self.rank.step is not None
        self.rank = rules.enter(self.rank, plan.epoch)
        assert self.rank.entered == plan.epoch, self
        self.stage = Stage.CROSSING
        self.deposit(plan, self.rank.step, self.record)

    def enter(self) -> None:
        assert self.target is not None
        if self.keeps(self.target):
            self.stage = Stage.BARRIER
            self.post(self.target, Frame(Kind.BARRIER, self.target.epoch))

    def leave(self) -> None:
        plan, step = self.target, self.rank.step
        assert plan is not None and step is not None
        others = self.others(plan)
        if not self.have(Kind.BARRIER, plan.epoch, others):
            return
        self.rank, verdict = rules.leave(self.rank, plan.epoch)
        assert verdict is Verdict.PASSED, self
        self.world, self.target, self.attempt = plan, None, None
        self.mail = {key: box for key, box in self.mail.items() if key[1] >= plan.epoch}
        self.out.tell(self, Passed(job=self.job, worker=self.uid, epoch=plan.epoch, step=step))
        self.resume()
