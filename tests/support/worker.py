"""One simulated rank under the rules of `core.rank`.

It is a little machine that is moved by what is delivered to it: frames of other ranks, orders of
its agent, and its own turns, which are the parts of a script that take time. Orders are heard at
any moment, as by a thread of their own: also between the last vote and the look at it.
"""

from __future__ import annotations

import dataclasses

from support.process import SCHEMA, Attempt, Frame, Kind, Process, Stage, mixed
from tmover.core import rank as rules
from tmover.core.events import (
    Broken,
    Entered,
    Finished,
    Looping,
    Passed,
    Plan,
    Prepared,
    PrepareFailed,
    Reported,
    Stored,
    Verified,
    Warm,
)
from tmover.core.orders import (
    Abort,
    AnyOrder,
    Arm,
    Assign,
    Done,
    Prepare,
    Revoke,
    Start,
    Store,
    Welcome,
)
from tmover.core.rank import Resolution, Saving, Verdict, Vote

TRAINING = (
    Stage.BUILDING, Stage.IDLE, Stage.REDUCING, Stage.KEEPING, Stage.VOTING, Stage.FINISHED,
)  # fmt: skip
"""Where a rank looks at the links of its world."""
CROSSING = (Stage.RECEIVING, Stage.CROSSING, Stage.BARRIER)
"""Where it looks at the links of the next."""


class Worker(Process):
    """A process and its rules."""

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
            case Store():
                self.store(order)
            case Assign():
                self.assign(order)
            case Done(epoch=epoch) if epoch == self.rank.epoch:
                self.links.release()
        self.run()

    def form(self, plan: Plan) -> None:
        if self.stage is not Stage.LAUNCHED or plan.epoch in self.rank.revoked:
            return
        self.world = plan
        self.links.form(plan)
        self.rank = rules.start(self.rank, plan.epoch)
        self.stage = Stage.BUILDING
        self.out.work(self)
        self.look(plan)

    def recast(self, order: Welcome) -> None:
        """Run the script again as another slot's rank."""
        assert self.stage is Stage.STANDBY, self
        assert self.rank.epoch == 0, self
        self.casts, self.proof = order.cast, "" if order.prove else None
        self.out.work(self)

    def get_ready(self, order: Prepare) -> None:
        epoch = order.plan.epoch
        if epoch <= self.rank.epoch or epoch in self.rank.revoked:
            return
        dead = self.unreachable(order.plan)
        if dead:
            self.out.tell(
                self,
                PrepareFailed(job="j", worker=self.uid, epoch=epoch, reason=f"no way to {dead}"),
            )
            return
        self.prepare = order
        self.links.prepare(order.plan, ())
        self.out.tell(self, Prepared(job="j", worker=self.uid, epoch=epoch))

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
        if self.stage in (Stage.COUNTING, Stage.PASSING):
            self.turn()
        assert self.stage not in (Stage.LAUNCHED, Stage.BUILDING), self
        assert order.plan.rank_of(self.uid) is not None, (self, order)
        if self.world is not None:
            self.rank = rules.revoke(self.rank, self.rank.epoch)
        self.order, self.target, self.prepare = order, order.plan, None
        named = {peer for pair in order.relink if self.uid in pair for peer in pair}
        afresh = {m.endpoint for m in order.plan.members if m.worker in named}
        self.links.prepare(order.plan, afresh)
        self.broken -= afresh
        self.stage = Stage.RECEIVING
        if not self.look(order.plan) or self.uid in order.sources:
            return
        self.reach(order.step)
        self.send_states(order.plan, order.sources)
        self.cross(order.plan)

    def store(self, order: Store) -> None:
        """Store this rank's state, and what it keeps for others, as of the step of the order."""
        if self.stage in (Stage.COUNTING, Stage.PASSING):
            self.turn()
        mine = self.number(self.here)
        self.rank = rules.revoke(self.rank, self.rank.epoch)
        self.reach(order.step)
        for rank in order.parts[self.uid]:
            record = self.record if rank == mine else self.kept[order.step]
            self.out.stored(self, order.step, rank=rank, record=record)
        epoch, step = order.plan.epoch, order.step
        self.out.tell(self, Stored(job="j", worker=self.uid, epoch=epoch, step=step))

    def reach(self, step: int) -> None:
        """Stand at the step that was decided, from what this rank holds."""
        resolution = rules.resolve(self.rank, step)
        assert resolution is not Resolution.RECEIVE, f"{self} cannot stand at {step}"
        if resolution is Resolution.APPLY:
            self.rank = rules.applied(self.rank, step)
            self.apply()
        self.attempt = None

    # --- frames -----------------------------------------------------------------------------------

    def receive(self, peer: str, frame: Frame) -> None:
        if frame.kind in (Kind.END, Kind.CUT):
            self.broken.add(f"{peer}:{frame.step}")
            self.links.cut(f"{peer}:{frame.step}")
            self.look_around()
        elif frame.kind is Kind.REVOKE:
            if frame.epoch in (self.rank.epoch, self.target.epoch if self.target else 0):
                self.revoke(frame.epoch)
                self.report(frame.epoch)
        elif frame.epoch >= self.rank.epoch and frame.epoch not in self.rank.revoked:
            self.put(peer, frame)
        self.run()

    def look_around(self) -> None:
        """Notice broken links where the script is looking."""
        if self.stage in TRAINING:
            self.look(self.here)
        elif self.stage in (*CROSSING, Stage.LEFT):
            self.look(self.there)

    def look(self, plan: Plan) -> bool:
        """Return whether all links of `plan` are whole; accuse the other ends if not."""
        peers = [m.worker for m in plan.members if m.endpoint in self.broken]
        if plan is not self.world:
            peers += [peer for peer in self.unreachable(plan) if peer not in peers]
        if not peers or plan.epoch in self.rank.revoked:
            return not peers
        if plan.epoch not in self.accused:
            self.accused.add(plan.epoch)
            accusation = Broken(
                job="j", worker=self.uid, epoch=plan.epoch, peers=tuple(peers), reason="gone"
            )
            self.out.tell(self, accusation)
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
            if self.stage in CROSSING:
                self.hold()
        elif epoch == self.rank.epoch and self.stage in TRAINING:
            self.hold()

    def hold(self) -> None:
        self.stage = Stage.HELD if self.rank.epoch else Stage.STANDBY

    def report(self, of: int) -> None:
        now = self.rank
        self.out.tell(
            self,
            Reported(
                job="j", worker=self.uid, of=of, epoch=now.epoch, step=now.step, doubt=now.doubt
            ),
        )

    # --- turns ------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do the part of the script that takes time."""
        match self.stage:
            case Stage.BUILDING:
                self.stage = Stage.IDLE
                self.out.tell(
                    self, Looping(job="j", worker=self.uid, launch=self.launch, schema=SCHEMA)
                )
                self.out.work(self)
            case Stage.STANDBY if self.rank.epoch == 0 and self.target is None:
                self.out.tell(
                    self,
                    Warm(
                        job="j",
                        worker=self.uid,
                        launch=self.launch,
                        schema=SCHEMA,
                        cast=self.casts,
                        proof=self.proof,
                    ),
                )
            case Stage.IDLE:
                self.compute()
            case Stage.COUNTING:
                self.count()
            case Stage.PASSING:
                self.leave()
        self.run()

    def compute(self) -> None:
        step, number = self.step + 1, self.number(self.here)
        self.attempt = Attempt(step=step, record=mixed(self.record, number, step))
        self.stage = Stage.REDUCING
        data = mixed(self.model, step, self.record)
        self.post(self.here, Frame(Kind.DATA, self.rank.epoch, step, (data,)))

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
                    if self.have(Kind.VOTE, self.rank.epoch, self.others(self.here)):
                        self.stage = Stage.COUNTING
                        self.out.work(self)
                case Stage.RECEIVING | Stage.STANDBY:
                    self.load()
                case Stage.CROSSING:
                    self.enter()
                case Stage.BARRIER:
                    if self.have(Kind.BARRIER, self.there.epoch, self.others(self.there)):
                        self.stage = Stage.PASSING
                        self.out.work(self)

    def reduce(self) -> None:
        epoch, others, attempt = self.rank.epoch, self.others(self.here), self.tried
        if not self.have(Kind.DATA, epoch, others):
            return
        data = {peer: self.take(Kind.DATA, epoch, peer).body[0] for peer in others}
        data[self.uid] = mixed(self.model, attempt.step, self.record)
        gradient = mixed(*(data[m.worker] for m in self.here.members))
        self.attempt = dataclasses.replace(attempt, gradient=gradient)
        self.stage = Stage.KEEPING
        self.deposit(self.here, attempt.step, attempt.record)

    def deposit(self, plan: Plan, step: int, record: int) -> None:
        """Give this rank's records to its keeper."""
        keeper = self.keeper(plan)
        if keeper is not None:
            self.out.send(self, keeper, Frame(Kind.RECORD, plan.epoch, step, (record,)))

    def keeps(self, plan: Plan) -> bool:
        """Take the ward's records; return whether they have come."""
        ward = self.ward(plan)
        if ward is None:
            return True
        if not self.have(Kind.RECORD, plan.epoch, [ward]):
            return False
        frame = self.take(Kind.RECORD, plan.epoch, ward)
        self.kept = {s: r for s, r in self.kept.items() if s >= frame.step - 1}
        self.kept[frame.step] = frame.body[0]
        return True

    def vote(self) -> None:
        if not self.keeps(self.here):
            return
        good, self.will_refuse = not self.will_refuse, False
        self.rank, self.cast = rules.cast(self.rank, self.tried.step, good=good)
        self.stage = Stage.VOTING
        body = (self.cast.step, int(self.cast.good), self.cast.armed, int(self.cast.checkpoint))
        self.post(self.here, Frame(Kind.VOTE, self.rank.epoch, self.cast.step, body))

    def count(self) -> None:
        epoch, others = self.rank.epoch, self.others(self.here)
        bodies = [self.take(Kind.VOTE, epoch, peer).body for peer in others]
        votes = [self.cast, *(Vote(k, bool(g), armed, bool(save)) for k, g, armed, save in bodies)]
        self.rank, verdict, switch = rules.tally(self.rank, votes)
        if verdict is Verdict.BROKEN:
            self.hold()
            return
        if verdict is Verdict.REFUSED:
            self.resume()
            return
        self.apply()
        if switch and self.step < self.total - 1:
            self.boundary(switch)
        else:
            self.resume()

    def apply(self) -> None:
        self.model = mixed(self.model, self.tried.gradient)
        self.record = self.tried.record
        assert self.tried.step == self.done + 1, f"{self} applies {self.tried.step} again"
        self.done = self.tried.step
        self.out.applied(self, self.done)
        self.out.committed(self, self.done, saves=self.rank.saving is Saving.NOW)

    def resume(self) -> None:
        """Go on training, or rest at the end."""
        if self.rank.step == self.total - 1:
            self.stage = Stage.FINISHED
            self.out.tell(self, Finished(job="j", worker=self.uid, step=self.total - 1))
        else:
            self.stage = Stage.IDLE
            self.out.work(self)
        self.look_around()

    # --- switching --------------------------------------------------------------------------------

    def boundary(self, epoch: int) -> None:
        """All have voted to switch to `epoch` here."""
        order = self.prepare
        if order is None or order.plan.epoch != epoch or epoch in self.rank.revoked:
            self.resume()  # it is over already: whoever has gone ahead comes back
            return
        self.out.tell(self, Entered(job="j", worker=self.uid, epoch=epoch, step=self.step))
        self.target = order.plan
        if order.plan.rank_of(self.uid) is None:
            self.stage = Stage.LEFT
            self.send_states(order.plan, order.sources)
            self.look(order.plan)
        elif self.look(order.plan):
            self.cross(order.plan)
        else:
            self.stage = Stage.HELD

    def send_states(self, plan: Plan, sources: dict[str, str]) -> None:
        """Hand over the model, and the receiver's records: a leaver's own, or what is kept."""
        for peer in [peer for peer, source in sources.items() if source == self.uid]:
            if plan.rank_of(self.uid) is None:
                record = self.record
            else:
                assert self.ward(plan) == peer, f"{self} does not keep the records of {peer}"
                record = self.kept[self.step]
            self.out.send(self, peer, Frame(Kind.HALF_STATE, plan.epoch, self.step))
            body = (self.model, record)
            self.out.send(self, peer, Frame(Kind.STATE, plan.epoch, self.step, body))

    def load(self) -> None:
        """Take the state that this rank is to have in its next world."""
        order = self.order if self.stage is Stage.RECEIVING else self.prepare
        if order is None or order.plan.epoch in self.rank.revoked or self.uid not in order.sources:
            return
        plan, source = order.plan, order.sources[self.uid]
        if self.have(Kind.HALF_STATE, plan.epoch, [source]):
            self.rank = rules.emptied(self.rank)
            self.model = self.record = 0
        if not self.have(Kind.STATE, plan.epoch, [source]):
            return
        frame = self.take(Kind.STATE, plan.epoch, source)
        self.model, self.record = frame.body
        self.target, self.attempt, self.kept = plan, None, {}
        self.rank = rules.applied(self.rank, frame.step)
        assert frame.step >= self.done, f"{self} goes back to {frame.step}"
        self.done = frame.step
        self.out.applied(self, self.done)
        self.out.tell(self, Verified(job="j", worker=self.uid, epoch=plan.epoch, step=frame.step))
        if self.look(plan):
            self.cross(plan)
        else:
            self.hold()

    def cross(self, plan: Plan) -> None:
        self.rank = rules.enter(self.rank, plan.epoch)
        assert self.rank.entered == plan.epoch, self
        self.stage = Stage.CROSSING
        self.deposit(plan, self.step, self.record)

    def enter(self) -> None:
        if self.keeps(self.there):
            self.stage = Stage.BARRIER
            again = [m.worker for m in self.there.members if self.links.is_cut(m.endpoint)]
            assert not again, f"{self} uses links that were cut, to {again}"
            for peer, link in self.linked().items():
                self.out.send(self, peer, Frame(Kind.BARRIER, self.there.epoch, body=(link,)))

    def linked(self) -> dict[str, int]:
        """Return which link to each other rank of its next world this one uses."""
        plan = self.there
        others = [member for member in plan.members if member.worker != self.uid]
        return {m.worker: self.links.to(m.endpoint, plan.epoch) for m in others}

    def leave(self) -> None:
        plan = self.there
        for peer, link in self.linked().items():
            (said,) = self.take(Kind.BARRIER, plan.epoch, peer).body
            assert said == link, f"{self} and {peer} use the links of {link} and {said}"
        self.rank, verdict = rules.leave(self.rank, plan.epoch)
        if verdict is Verdict.BROKEN:
            self.hold()
            return
        self.world, self.target, self.attempt = plan, None, None
        self.links.enter()
        self.mail = {key: box for key, box in self.mail.items() if key[1] >= plan.epoch}
        self.out.tell(self, Passed(job="j", worker=self.uid, epoch=plan.epoch, step=self.step))
        self.resume()
