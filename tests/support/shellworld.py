"""The simulated world under the real controller: shell, journal and errands, over a `FakeSlurm`.

Ranks and agents are those of `world`; what they say goes to a `Controller` as if over its socket,
and it may die at any point (`mortal`). Slurm starts and ends agents, and a person asks, again if
there was no answer. Time passes when nothing else can happen: steps, heartbeats, leases and polls
are due then.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from support.clockwork import Clockwork
from support.fake_slurm import ADMINISTRATOR, FakeSlurm
from support.mortal import Crash, Doom, Life, MortalGate, MortalJournal, mortal
from support.process import Process, Stage
from support.schedulers import ScriptedScheduler
from support.world import SimAgent, World
from tmover import wire
from tmover.config import Config, DeadlineConfig
from tmover.controller.desk import Desk, Ledger
from tmover.controller.gate import Heard
from tmover.controller.presence import speaker
from tmover.controller.shell import Controller
from tmover.core.events import AnyEvent, FromAgent, Joined
from tmover.core.job import Job
from tmover.core.orders import Order
from tmover.core.phase import Ended
from tmover.core.phase import Stage as JobStage
from tmover.scheduler.slurm.allocations import SlurmAllocations
from tmover.scheduler.slurm.client import SlurmClient
from tmover.scheduler.slurm.poller import Poller
from tmover.scheduler.slurm.render import tag
from tmover.scheduler.slurm.run import Command

PACE_S = 1.0
"""How long a step takes, until the story is over."""
BEAT_S = 1.0
PREPARE_S = 5.0
"""How long phase 1 of a move may take: a few steps, as everywhere here."""
TOTAL = 24
SETTLED_AT = 3
"""The step after which a loss is no start that failed."""
MAIN = "1"
"""Slurm's id of the job."""
MAX_MOMENTS = 2000
_PERSON = "person"

Story = Callable[["ShellWorld"], Iterator[Callable[[], bool]]]
"""Does something, and yields what must be so before it goes on."""


class ShellWorld(World):
    """See the module."""

    def __init__(
        self,
        directory: pathlib.Path,
        story: Story,
        *,
        nnodes: int = 2,
        standbys: int = 1,
        doom: Doom | None = None,
        outage: int = 0,
    ) -> None:
        """`outage` is how many things happen before a controller that has died is there again."""
        self.directory, self.doom, self.outage = directory, doom or Doom(), outage
        self.loop = Clockwork()
        self.slurm = FakeSlurm(nnodes + 4)
        self.controller: Controller | None = None
        self.missed = 0
        """What has happened since it died."""
        self.incarnation = 0
        self.pace_s = PACE_S
        self.due: list[tuple[float, int, Process]] = []
        """Steps that begin later."""
        self.next_beat = self.loop.now
        self.moments = 0
        self.questions: dict[str, wire.AnyRequest] = {}
        """What a person has asked, and was not answered."""
        self.answers: list[wire.Reply] = []
        self.secrets: set[bytes] = set()
        self.deaf: set[tuple[str, type[Order]]] = set()
        """Agents that do not act on an order."""
        self.untidy: set[str] = set()
        """Workers that have finished with links open which no world needs."""
        self.places: dict[str, tuple[str, str]] = {}
        """Slurm's job and the node of each agent."""
        super().__init__(nnodes=nnodes, standbys=standbys, total=TOTAL)
        self.story = story(self)
        self.until: Callable[[], bool] | None = None
        self.is_told = False

    # --- the controller ---------------------------------------------------------------------------

    def begin(self, standbys: int) -> None:
        """Have a person submit the job, which is held in Slurm until it is known here."""
        self.name, self.wanted = f"slurm{MAIN}", standbys
        self.rise()
        argv = ("sbatch", "--parsable", f"-N{self.nnodes}", "-k", "-H", "-J", "gpt", "gpt.sh")
        self.slurm(Command(argv=argv))
        spec = wire.SlurmSpec(id=int(MAIN), name="gpt", script="#!/bin/sh\n", cwd="/")
        self.ask(
            wire.SubmitRequest(
                nnodes=self.nnodes, nproc=1, owner=ADMINISTRATOR, standby=standbys, slurm=spec
            )
        )

    def rise(self) -> None:
        """Start a controller on what the one before has left."""
        self.incarnation += 1
        self.missed = 0
        self.life = Life(self.doom)
        asyncio.set_event_loop(self.loop)
        self.gate = MortalGate(self.life, self.told)
        self.journal_file = MortalJournal(self.directory / "journal", self.life)
        self.desk = Desk(self.journal_file)
        self.see_job()
        config = Config(deadlines=DeadlineConfig(prepare_s=PREPARE_S))
        client = SlurmClient(mortal(self.slurm, self.life), clock=self.loop.time)
        self.controller = Controller(
            config,
            self.directory,
            boot=f"boot{self.incarnation}",
            desk=self.desk,
            gate=self.gate,
            scheduler=ScriptedScheduler(),
            allocations=SlurmAllocations(
                self.directory / "slurm", config.slurm, config.standby,
                poller=Poller(client, poll_s=config.slurm.poll_s),
                client_of=lambda _: client, clock=self.loop.time,
            ),
        )  # fmt: skip
        self.running = self.loop.create_task(self.controller.run())
        for agent in self.agents.values():
            if agent.alive:
                self.say_all(agent)
        for route, request in self.questions.items():
            self.put(("up", _PERSON), (route, request))

    def fall(self) -> None:
        """The controller has died: nothing of it goes on, and what was on its way is lost."""
        self.controller = None
        self.life.is_over = True
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            try:
                self.loop.settle()
            except Crash:
                continue
        self.loop.forget()
        self.journal_file.close()
        self.drop("up")
        self.drop("down")

    def settle(self) -> None:
        """Let the controller do all that it can do now."""
        if self.controller is None:
            return
        try:
            self.loop.settle()
        except Crash:
            self.fall()
            return
        assert not self.running.done(), self.running
        self.see_job()

    def see_job(self) -> None:
        if self.ledger is not None:
            self.job = self.ledger.job

    @property
    def ledger(self) -> Ledger | None:
        return self.desk.ledgers.get(self.name)

    def decide(self, event: AnyEvent) -> None:
        """Have an agent's word arrive."""
        said = cast("FromAgent", event)
        self.hand_in(self.route(speaker(said).agent), msgspec.structs.replace(said, job=self.name))

    def hand_in(self, route: str, message: wire.ToController) -> None:
        if self.controller is not None:
            self.gate.inbox.put_nowait(Heard(route.encode(), message, ""))

    def route(self, who: str) -> str:
        return f"{who}#{self.incarnation}"

    def told(self, route: bytes, message: wire.FromController) -> None:
        """Hear what the controller says; it travels like everything else."""
        who, _, incarnation = route.decode().partition("#")
        if incarnation != str(self.incarnation):
            return
        if isinstance(message, wire.Reply):
            self.answers.append(message)
            self.questions.pop(who, None)
        elif who in self.agents and self.agents[who].alive:
            if isinstance(message, Order):
                self.orders.append(message)
                self.check_plan(message)
            self.put(("down", who), message)

    # --- people, agents, Slurm --------------------------------------------------------------------

    def ask(self, request: wire.AnyRequest) -> None:
        """Ask the controller, until it has answered."""
        route = f"{_PERSON}{self.clock}"
        self.questions[route] = request
        self.put(("up", _PERSON), (route, request))

    def say_all(self, agent: SimAgent) -> None:
        for event in (agent.joined, *agent.kept.values()):
            self.put(("up", agent.name), event)

    def deliver(self, key: tuple[str, ...], item: Any) -> None:
        match key:
            case ("up", who) if who == _PERSON:
                self.hand_in(f"{item[0]}#{self.incarnation}", item[1])
            case ("down", name) if (name, type(item)) in self.deaf:
                pass
            case ("down", name) if not isinstance(item, Order):
                if isinstance(item, wire.Greeting):
                    self.secrets.add(item.secret)
                elif isinstance(item, wire.WhoAreYou):
                    self.say_all(self.agents[name])
            case _:
                super().deliver(key, item)

    def follow_slurm(self) -> None:
        """Start and end agents as Slurm does, and its jobs as their agents do."""
        main = self.slurm.jobs[MAIN]
        if main.is_held and self.answers:
            main.is_held = False
            self.slurm.schedule()
        for job in self.slurm.jobs.values():
            held = [*job.nodes] if job.state == "RUNNING" else []
            for slot, node in enumerate(held):
                if (job.id, node) not in self.places.values():
                    self.start_agent(job.id, node, slot if job.id == MAIN else None)
            for name, (id_, node) in self.places.items():
                if id_ == job.id and node not in held:
                    self.kill(self.agents[name])
            ours = [self.agents[name] for name, place in self.places.items() if place[0] == job.id]
            if held and not any(agent.alive for agent in ours):
                self.slurm.end(job.id, "COMPLETED")

    def start_agent(self, job: str, node: str, slot: int | None) -> None:
        name = f"{node}-{len(self.agents)}"
        assert slot is not None or self.slurm.jobs[job].comment == tag(self.name)
        joined = Joined(
            job="j", agent=name, node=node, address=name, nproc=1, standby=slot is None, slot=slot
        )
        self.agents[name] = SimAgent(joined)
        self.places[name] = (job, node)
        self.say_all(self.agents[name])

    def kill(self, agent: SimAgent) -> None:
        ranks = [w for w in agent.workers.values() if w.stage is Stage.FINISHED]
        self.untidy |= {worker.uid for worker in ranks if worker.links.has_remains}
        super().kill(agent)

    def work(self, worker: Process) -> None:
        if worker.stage is Stage.IDLE and self.pace_s:
            self.clock += 1
            heapq.heappush(self.due, (self.loop.now + self.pace_s, self.clock, worker))
        else:
            super().work(worker)

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> ShellWorld:
        """Let everything happen until the job is over and nothing is left of it."""
        while self.moments < MAX_MOMENTS:
            self.tick += 1
            self.settle()
            self.follow_slurm()
            self.tell_story()
            self.recover()
            if self.happen():
                self.missed += 1
            elif self.is_over():
                return self
            elif self.controller is not None:
                self.pass_time()
            else:
                self.missed = self.outage
        message = f"the story does not end: {self.job.phase}"
        raise AssertionError(message)

    def recover(self) -> None:
        if self.controller is None and self.missed >= self.outage:
            self.rise()

    def tell_story(self) -> None:
        if self.controller is None or (self.until is not None and not self.until()):
            return
        self.until = next(self.story, None)
        if self.until is None:
            self.is_told, self.until, self.pace_s = True, bool, 0.0

    def is_over(self) -> bool:
        """Return whether the job has ended, and nothing of it is left anywhere."""
        if self.controller is None or not isinstance(self.job.phase, Ended) or self.questions:
            return False
        ledger = self.ledger
        held = [job for job in self.slurm.jobs.values() if job.state in ("PENDING", "RUNNING")]
        return ledger is not None and not (ledger.effects or held)

    def pass_time(self) -> None:
        """Go to the moment at which the next thing is due."""
        self.moments += 1
        times = [self.next_beat, *(at for at, _, _ in self.due[:1])]
        timer = self.loop.next_at()
        self.loop.now = max(self.loop.now, min([*times, *([] if timer is None else [timer])]))
        while self.due and (self.due[0][0] <= self.loop.now or not self.pace_s):
            _, _, worker = heapq.heappop(self.due)
            if self.worker(worker.uid) is worker:
                super().work(worker)
        if self.next_beat <= self.loop.now:
            self.next_beat = self.loop.now + BEAT_S
            for agent in self.agents.values():
                if agent.alive:
                    beat = wire.Heartbeat(job=self.name, agent=agent.name)
                    self.hand_in(self.route(agent.name), beat)

    # --- what stories ask -------------------------------------------------------------------------

    def is_in(self, *stages: JobStage) -> bool:
        return self.job.phase.stage in stages

    def is_training(self, *, warm: int = 0) -> bool:
        """Return whether all ranks train, and have for some steps, and standbys are warm."""
        ready = [a for a in self.job.agents.values() if a.sandbox and a.is_ready]
        seated = [self.agents[name] for name in self.job.slots if name in self.agents]
        ranks = [worker for agent in seated for worker in agent.workers.values()]
        is_settled = all((w.rank.step or 0) >= SETTLED_AT for w in ranks)
        return self.is_in(JobStage.TRAINING) and len(ready) >= warm and is_settled

    def nodes(self) -> list[str]:
        """Return the node of each slot."""
        return [self.agents[name].node for name in self.job.slots if name in self.agents]

    def agent_on(self, slot: int) -> SimAgent:
        return self.agents[self.job.slots[slot]]

    def standby(self) -> SimAgent:
        """Return a standby that is warm."""
        ready = [a.name for a in self.job.agents.values() if a.sandbox and a.is_ready]
        return self.agents[ready[0]]

    def outcome(self) -> dict[str, object]:
        """Return what must be the same, wherever the controller died."""
        phase = self.job.phase
        assert isinstance(phase, Ended), phase
        first = {f"node{number + 1}" for number in range(self.nnodes)}
        submitted = [c for c in self.slurm.commands if c.argv[0] == "sbatch"]
        return {
            "code": phase.code,
            "reason": phase.reason,
            "nodes": [node if node in first else "a standby's" for node in self.nodes()],
            "submitted": len(submitted),
            "slurm": {job.id: (job.state, *job.nodes) for job in self.slurm.jobs.values()},
            "finished": len(self.finished),
            "untidy": self.untidy,
            "secrets": len(self.secrets),
            "incidents": collections.Counter(str(i.kind) for i in self.job.incidents),
        }

    def check(self) -> None:
        """Check that the journal leads to what the controller knows, and close it."""
        assert self.is_told, f"the story did not come to its end: {self.outcome()}"
        assert not any(agent.alive for agent in self.agents.values()), "somebody was not told"
        job, ledger = self.job, self.ledger
        self.fall()
        self.loop.close()
        journal = MortalJournal(self.directory / "journal", Life(Doom()))
        again = Desk(journal).ledgers[self.name]
        journal.close()
        assert ledger is not None
        assert again.job == job, "the journal does not lead to the same job"
        assert again.effects == ledger.effects


__all__ = ["Job", "ShellWorld", "Story"]
