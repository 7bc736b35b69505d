"""What no order of events may ever break."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.jobs import Story, joined
from tmover.core import snapshot, standby
from tmover.core.draft import Draft
from tmover.core.events import (
    Answered,
    AnyEvent,
    Broken,
    CancelRequested,
    DeadlinePassed,
    Entered,
    Exited,
    Finished,
    Launched,
    LeaseExpired,
    Left,
    Lent,
    Looping,
    MoveRequested,
    NodeLost,
    NodeReady,
    Passed,
    Plan,
    Prepared,
    PrepareFailed,
    Reported,
    StandbysGone,
    Stepped,
    Stored,
    Straggling,
    Stuck,
    Verified,
    Wait,
    Warm,
)
from tmover.core.job import Job, decide, follow, resume, wake
from tmover.core.orders import (
    Abort,
    Action,
    Assign,
    Note,
    Order,
    Prepare,
    ReassignNode,
    Start,
    Stop,
    Store,
    Welcome,
)
from tmover.core.phase import (
    Accusing,
    Ended,
    Forming,
    Recovering,
    Reporting,
    Storing,
    Switching,
    Training,
    Waiting,
)

AGENTS = ("a0", "a1", "a2", "s0", "s1", "s2", "stranger")
agents = st.sampled_from(AGENTS)
workers = agents.map(lambda agent: f"{agent}/0")
nodes = st.sampled_from(("n0", "n1", "n2", "m0", "m1", "m2", "nowhere"))
back = st.sampled_from((0, 0, 0, 0, -1, 1))
steps = st.integers(-1, 3)
codes = st.sampled_from((-9, 1))
START = st.sampled_from(("submitted", "joined", "starting", "training", "training", "armed",
                         "switching", "revoked", "recovering"))  # fmt: skip


def places(job: Job) -> list[str]:
    """Return every place that an agent has, once for each."""
    move = standby.move_of(job)
    joiners = () if move is None else move.joiners
    return [name for name in (*job.slots, *job.unreleased.values(), *joiners) if name]


class AnyOrder(RuleBasedStateMachine):
    """Feed `decide` events in any order: early, late, repeated, from strangers."""

    @initialize(start=START, standbys=st.integers(0, 2))
    def start(self, start: str, standbys: int) -> None:
        story = Story(standbys=standbys)
        getattr(story, start)()
        self.first = self.job = story.job
        self.picture = repr(self.first)
        self.events: list[AnyEvent] = []
        self.actions: list[Action] = []
        self.plans: dict[int, Plan] = {}
        self.steps: list[int] = []
        if self.job.plan is not None:
            self.plans[self.job.plan.epoch] = self.job.plan
        move = standby.move_of(self.job)
        if move is not None:
            self.plans[move.epoch] = move.plan
        self.lost: set[str] = set(self.job.gone)

    # --- feeding ----------------------------------------------------------------------------------

    def feed(self, event: AnyEvent) -> None:
        before = self.job
        self.job, actions = decide(before, event)
        self.events.append(event)
        self.actions += actions
        self.look_back(before, event, actions)
        for action in actions:
            self.look_at(action)

    @invariant()
    def nothing_is_left_to_draw(self) -> None:
        """An event that says nothing new needs no look at all that is known."""
        draft = Draft(self.job, 0.0)
        follow(draft)
        assert draft.job is self.job
        assert draft.actions == []

    def look_back(self, before: Job, event: AnyEvent, actions: list[Action]) -> None:
        if isinstance(before.phase, Ended):
            assert self.job == before
        assert self.job.epoch >= before.epoch
        if self.job != before and not isinstance(self.job.phase, type(before.phase)):
            assert any(isinstance(action, Note) for action in actions), "no reason was given"
        assert before.gone.items() <= self.job.gone.items()
        assert not self.job.agents.keys() & self.job.gone.keys()
        if before.floor is not None and self.job.floor is not None:
            assert self.job.floor >= before.floor, "a decided step was reversed"
        if self.job.in_force != before.in_force and isinstance(self.job.phase, Recovering):
            self.check_reports(before, event)

    def check_reports(self, before: Job, event: AnyEvent) -> None:
        """No world is assigned before every survivor has reported on the one before."""
        reports = dict(before.reports)
        if isinstance(event, Reported):
            reports[event.worker, event.of] = event
        for name in before.slots:
            if self.job.is_alive(name) and before.is_alive(name):
                assert any(worker == f"{name}/0" for worker, _ in reports)

    def look_at(self, action: Action) -> None:
        if isinstance(action, Order):
            assert action.agent in AGENTS
        if isinstance(action, Start | Prepare | Assign) and not isinstance(action, Store):
            plan = action.plan
            assert self.plans.setdefault(plan.epoch, plan) == plan, "two worlds of one epoch"
            assert [member.rank for member in plan.members] == [0, 1, 2]
            assert len({member.worker for member in plan.members}) == 3
            members = {member.worker.rpartition("/")[0] for member in plan.members}
            assert not members & self.lost, "the lost are in a world"
            assert action.agent not in self.lost
        if isinstance(action, Assign) and not isinstance(action, Store):
            holders = {m.worker for m in action.plan.members} - action.sources.keys()
            assert set(action.sources.values()) <= holders
        if isinstance(action, Stop | ReassignNode):
            self.lost.add(action.agent)
        if isinstance(action, Welcome):
            assert action.agent not in self.lost

    # --- what agents and workers say --------------------------------------------------------------

    def launch(self, agent: str) -> int:
        known = self.job.agents.get(agent)
        return 1 if known is None else known.launch

    @rule(agent=agents)
    def joins(self, agent: str) -> None:
        self.feed(joined(agent, slot=0 if agent == "stranger" else None))

    @rule(agent=agents, off=back)
    def launches(self, agent: str, off: int) -> None:
        launch = self.launch(agent) + off
        self.feed(Launched(job="j", agent=agent, launch=launch, endpoints=(f"{agent}:{launch}",)))

    @rule(worker=workers, off=back, kind=st.sampled_from((Looping, Warm)), odd=st.booleans())
    def is_ready(self, worker: str, off: int, kind: Any, odd: bool) -> None:
        launch = self.launch(worker[:-2]) + off
        schema = {"model": "m", "optimizer": "p" if odd and kind is Warm else "o"}
        self.feed(kind(job="j", worker=worker, launch=launch, schema=schema))

    @rule(agent=agents, off=back, code=codes)
    def exits(self, agent: str, off: int, code: int) -> None:
        launch = self.launch(agent) + off
        self.feed(Exited(job="j", agent=agent, launch=launch, code=code, reason="x"))

    @rule(worker=workers, off=back)
    def is_prepared(self, worker: str, off: int) -> None:
        self.feed(Prepared(job="j", worker=worker, epoch=self.job.epoch + off))

    @rule(off=back)
    def all_are_prepared(self, off: int) -> None:
        for agent in places(self.job):
            self.feed(Prepared(job="j", worker=f"{agent}/0", epoch=self.job.epoch + off))

    @rule(worker=workers, off=back)
    def cannot_prepare(self, worker: str, off: int) -> None:
        epoch = self.job.epoch + off
        self.feed(PrepareFailed(job="j", worker=worker, epoch=epoch, reason="x"))

    @rule(worker=workers, off=back, step=steps, kind=st.sampled_from((Entered, Verified, Passed)))
    def gets_on(self, worker: str, off: int, step: int, kind: Any) -> None:
        self.feed(kind(job="j", worker=worker, epoch=self.job.epoch + off, step=step))

    @rule()
    def all_pass(self) -> None:
        if isinstance(self.job.phase, Switching | Recovering):
            for agent in places(self.job):
                self.feed(Passed(job="j", worker=f"{agent}/0", epoch=self.job.epoch, step=1))

    @rule(worker=workers, peer=workers, off=back)
    def accuses(self, worker: str, peer: str, off: int) -> None:
        epoch = self.job.epoch + off
        self.feed(Broken(job="j", worker=worker, epoch=epoch, peers=(peer,), reason="x"))

    @rule(worker=workers, off=back, at=back, step=st.none() | steps, doubt=st.booleans())
    def reports(self, worker: str, off: int, at: int, step: int | None, doubt: bool) -> None:
        of = self.job.epoch + off
        self.feed(
            Reported(
                job="j",
                worker=worker,
                of=of,
                epoch=max(0, of + min(at, 0)),
                step=step,
                doubt=step + 1 if doubt and step is not None else None,
            )
        )

    @rule(step=steps)
    def all_report(self, step: int) -> None:
        if isinstance(self.job.phase, Accusing | Reporting):
            for epoch in self.job.phase.loss.epochs:
                for agent in places(self.job):
                    self.feed(
                        Reported(
                            job="j",
                            worker=f"{agent}/0",
                            of=epoch,
                            epoch=self.job.in_force,
                            step=step,
                            doubt=None,
                        )
                    )

    @rule(worker=workers, off=back, reason=st.sampled_from(("", "the disk is full")))
    def stores(self, worker: str, off: int, reason: str) -> None:
        epoch = self.job.epoch + off
        self.feed(Stored(job="j", worker=worker, epoch=epoch, step=1, reason=reason))

    @rule(worker=workers, off=back)
    def has_stepped(self, worker: str, off: int) -> None:
        self.feed(Stepped(job="j", worker=worker, epoch=self.job.in_force + off, step=2))

    @rule()
    def no_node_comes(self) -> None:
        if isinstance(self.job.phase, Waiting):
            epoch = self.job.phase.loss.epochs[-1]
            self.feed(DeadlinePassed(job="j", wait=Wait.NODE, epoch=epoch))

    @rule(agent=agents, off=back)
    def answers(self, agent: str, off: int) -> None:
        self.feed(Answered(job="j", agent=agent, probe=self.job.epoch + off))

    @rule(agent=agents, code=st.sampled_from([0, 1, -15]))
    def leaves(self, agent: str, code: int) -> None:
        self.feed(Left(job="j", agent=agent, code=code, reason="x"))

    @rule(worker=workers)
    def finishes(self, worker: str) -> None:
        self.feed(Finished(job="j", worker=worker, step=3))

    # --- what others say --------------------------------------------------------------------------

    @rule(node=nodes)
    def move_requested(self, node: str) -> None:
        self.feed(MoveRequested(job="j", node=node, reason="x"))

    @rule(node=nodes, more=st.lists(nodes, max_size=3))
    def several_moves_requested(self, node: str, more: list[str]) -> None:
        self.feed(MoveRequested(job="j", node=node, reason="x", more=tuple(more)))

    @rule(node=nodes)
    def node_ready(self, node: str) -> None:
        self.feed(NodeReady(job="j", node=node))

    @rule(node=nodes)
    def node_lost(self, node: str) -> None:
        self.feed(NodeLost(job="j", node=node, reason="x"))

    @rule(agent=agents, back=back)
    def stuck(self, agent: str, back: int) -> None:
        epoch = self.job.in_force + back
        self.feed(Stuck(job="j", agent=agent, epoch=epoch, reason="all wait for it"))

    @rule(agent=agents, back=back, act=st.booleans())
    def straggling(self, agent: str, back: int, act: bool) -> None:
        epoch = self.job.in_force + back
        self.feed(Straggling(job="j", agent=agent, epoch=epoch, reason="it is slow", act=act))

    @rule(agent=agents)
    def lease_expired(self, agent: str) -> None:
        self.feed(LeaseExpired(job="j", agent=agent))

    @rule(agent=agents)
    def lent(self, agent: str) -> None:
        self.feed(Lent(job="j", agent=agent, to="k"))

    @rule(wait=st.sampled_from(list(Wait)), off=back)
    def deadline_passed(self, wait: Wait, off: int) -> None:
        self.feed(DeadlinePassed(job="j", wait=wait, epoch=self.job.epoch + off))

    @rule(off=back)
    def standbys_gone(self, off: int) -> None:
        self.feed(StandbysGone(job="j", epoch=self.job.ordered.epoch + off))

    @rule()
    def cancelled(self) -> None:
        if len(self.events) > 40:
            self.feed(CancelRequested(job="j", reason="x"))

    @rule(data=st.data())
    def something_comes_again(self, data: st.DataObject) -> None:
        if self.events:
            self.feed(data.draw(st.sampled_from(self.events)))

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def no_agent_has_two_places(self) -> None:
        found = places(self.job)
        assert len(found) == len(set(found)), found

    @invariant()
    def the_world_keeps_its_size(self) -> None:
        assert len(self.job.slots) == 3
        if self.job.plan is not None:
            assert len(self.job.plan.members) == 3

    @invariant()
    def every_agent_in_a_place_knows_its_slot(self) -> None:
        for slot, name in enumerate(self.job.slots):
            agent = self.job.agents.get(name)
            if agent is not None:
                assert (agent.slot, agent.sandbox) == (slot, False), name

    @invariant()
    def a_world_in_force_is_made_of_those_who_hold_its_slots(self) -> None:
        if isinstance(self.job.phase, Training | Recovering) and self.job.plan is not None:
            holders = [member.worker.rpartition("/")[0] for member in self.job.plan.members]
            assert holders == list(self.job.slots)

    @invariant()
    def a_loss_is_acted_on_at_once(self) -> None:
        if isinstance(self.job.phase, Training | Recovering):
            assert not self.job.vacant()

    @invariant()
    def a_move_is_under_way_whenever_one_is_needed_and_possible(self) -> None:
        job = self.job
        if isinstance(job.phase, Training) and not job.finished:
            wanted = [s for s, a in enumerate(job.slots) if job.agents[a].node in job.requests]
            assert not any(standby.candidates(job, slot) for slot in wanted)
        if isinstance(job.phase, Waiting):
            assert not all(standby.candidates(job, slot) for slot in job.vacant()[:1])

    @invariant()
    def whoever_is_needed_is_there_or_on_the_way_or_asked_for(self) -> None:
        job = self.job
        if isinstance(job.phase, Waiting):
            assert len(standby.spare(job)) + job.ordered.nodes >= len(job.vacant())

    @invariant()
    def every_wait_has_a_deadline(self) -> None:
        phase = self.job.phase
        if not isinstance(phase, Training | Ended):
            assert wake(self.job)

    @invariant()
    def whoever_must_report_was_asked_to(self) -> None:
        phase = self.job.phase
        if isinstance(phase, Accusing | Reporting):
            for name in self.job.slots:
                if self.job.is_alive(name):
                    assert len(resume(self.job, name)) > 1

    @invariant()
    def a_last_checkpoint_has_the_part_of_every_rank_once(self) -> None:
        phase = self.job.phase
        if isinstance(phase, Storing):
            ranks = [rank for part in phase.parts.values() for rank in part]
            assert sorted(ranks) == [0, 1, 2]
            assert all(self.job.is_alive(worker[:-2]) for worker in phase.parts)

    @invariant()
    def an_incident_is_open_as_long_as_training_is_disturbed(self) -> None:
        incidents = self.job.incidents
        open_ = [incident for incident in incidents if not incident.outcome]
        assert open_ in ([], list(incidents[-1:]))
        if isinstance(self.job.phase, Training | Ended):
            assert not open_
        if isinstance(self.job.phase, Waiting | Storing | Recovering | Switching):
            assert open_
        numbers = [incident.number for incident in incidents]
        assert numbers == sorted(set(numbers))

    @invariant()
    def nobody_trains_beyond_an_abort(self) -> None:
        ended = {action.epoch for action in self.actions if isinstance(action, Abort)}
        assert self.job.in_force not in ended

    @invariant()
    def the_first_world_is_formed_of_fresh_workers(self) -> None:
        if isinstance(self.job.phase, Forming):
            assert self.job.floor is None
            assert not self.job.finished

    @invariant()
    def a_snapshot_of_it_is_all_of_it(self) -> None:
        written = msgspec.json.encode(snapshot.save(self.job))
        restored = snapshot.restore(msgspec.json.decode(written))
        assert restored == self.job
        assert msgspec.json.encode(snapshot.save(restored)) == written, "in the same order, too"

    def teardown(self) -> None:
        """A journal written by one controller brings the next one to the same place."""
        if not hasattr(self, "first"):
            return
        assert repr(self.first) == self.picture, "decide changed the job it was given"
        journal = [msgspec.json.encode(event) for event in self.events]
        job, actions = self.first, []
        for line in journal:
            job, more = decide(job, msgspec.json.decode(line, type=AnyEvent))
            actions += more
        assert (job, actions) == (self.job, self.actions)


AnyOrder.TestCase.settings = settings(stateful_step_count=40)
TestAnyOrder = pytest.mark.timeout(600)(AnyOrder.TestCase)  # many runs: a busy machine takes long
