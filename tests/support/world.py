"""A whole job in one process: simulated ranks and agents, and the real `decide`.

Everything that happens lies in a queue until the tape says that it is next: each frame of each
link, each message up or down, each turn of a script. Only heads of queues can be next, since links
and connections keep their order. When nothing is left, the leases and timers that run are over.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from support.chaos import Chaos, disturb
from support.process import Frame, Kind, Process, mixed
from support.worker import Worker
from tmover.core import snapshot
from tmover.core.events import (
    Answered,
    AnyEvent,
    DeadlinePassed,
    Exited,
    Finished,
    FromAgent,
    Joined,
    Launched,
    LeaseExpired,
    Plan,
    Submitted,
    Wait,
)
from tmover.core.job import Job, decide, wake
from tmover.core.orders import (
    Action,
    AnyOrder,
    ArmDeadline,
    Assign,
    EndNode,
    Order,
    OrderNode,
    Prepare,
    Probe,
    Start,
    Stop,
    Store,
    Welcome,
)
from tmover.core.phase import Ended, Waiting

MAX_TICKS = 20_000


class SimAgent:
    """One `tmover run`: it relays, and keeps the last word of each kind for a new controller."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.name, self.node = joined.agent, joined.node
        self.launch = self.cast = 0
        self.workers: dict[str, Worker] = {}
        self.kept: dict[tuple[str, str], FromAgent] = {}
        self.alive = True
        self.exited: Exited | None = None

    def remember(self, event: FromAgent) -> None:
        who = getattr(event, "worker", "")
        self.kept.pop((who, type(event).__name__), None)
        self.kept[who, type(event).__name__] = event


class World:
    """The simulation."""

    def __init__(
        self,
        *,
        nnodes: int = 3,
        nproc: int = 1,
        standbys: int = 1,
        spares: int = 0,
        total: int = 4,
        tape: bytes = b"",
        chaos: Iterable[Chaos] = (),
    ) -> None:
        self.nnodes, self.nproc, self.total = nnodes, nproc, total
        self.spares = spares
        self.tape: Iterator[int] = iter(tape)
        self.chaos = sorted(chaos)
        self.queues: dict[tuple[str, ...], collections.deque[tuple[int, Any]]] = {}
        self.clock = 0
        self.tick = 0
        self.agents: dict[str, SimAgent] = {}
        self.job = Job(name="j")
        self.journal: list[AnyEvent] = []
        self.orders: list[AnyOrder] = []
        self.timers: dict[tuple[Wait, int], None] = {}
        self.plans: dict[int, Plan] = {}
        self.truth = undisturbed(nnodes * nproc, total)
        self.log: list[str] = []
        self.asked: list[tuple[str, int]] = []
        """Who was asked for a checkpoint, and what step it had applied last."""
        self.saved: dict[tuple[int, int], dict[int, bool]] = {}
        """By epoch and step, and then by rank: whether a checkpoint was to be taken after it."""
        self.finished: set[str] = set()
        self.begin(standbys)

    def begin(self, standbys: int) -> None:
        """Submit the job, and have its agents come up."""
        self.decide(Submitted(job="j", nnodes=self.nnodes, nproc=self.nproc, owner="me"))
        for slot in range(self.nnodes):
            self.boot(f"a{slot}", standby=False, slot=slot)
        for standby in range(standbys):
            self.boot(f"s{standby}", standby=True)

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> World:
        """Let everything happen, in the tape's order, until nothing can."""
        while self.tick < MAX_TICKS:
            self.tick += 1
            while self.chaos and self.chaos[0].tick <= self.tick:
                disturb(self, self.chaos.pop(0))
            if not self.happen() and not self.wait():
                if not self.chaos:
                    return self
                disturb(self, self.chaos.pop(0))
        pytest.fail("the run does not end")

    def happen(self) -> bool:
        """Let the next thing happen; return False if there is none."""
        heads = sorted((queue[0][0], key) for key, queue in self.queues.items())
        if not heads:
            return False
        _, key = heads[next(self.tape, 0) % len(heads)]
        _, item = self.queues[key].popleft()
        if not self.queues[key]:
            del self.queues[key]
        self.log.append(f"{self.tick} {key} {item}")
        self.deliver(key, item)
        return True

    def deliver(self, key: tuple[str, ...], item: Any) -> None:
        match key:
            case ("link", source, peer):
                for worker in [w for w in self.living() if w.uid == peer]:
                    worker.receive(source, item)
            case ("cpu", _):
                item.turn()
            case ("up", _):
                self.decide(item)
            case ("down", name):
                self.hear(self.agents[name], item)
            case ("launch", name):
                self.launch(self.agents[name], item)
            case ("boot", name):
                self.boot(name, standby=True)
            case ("fence", node):
                self.kill(self.agents[node[2:]])

    def wait(self) -> bool:
        """Let time pass until a lease or a timer is over; return False if none runs."""
        if isinstance(self.job.phase, Ended):
            return False
        due: list[AnyEvent] = [
            LeaseExpired(job="j", agent=name)
            for name, agent in self.agents.items()
            if not agent.alive and name in self.job.agents
        ]
        due += [
            DeadlinePassed(job="j", wait=wait, epoch=epoch)
            for wait, epoch in self.timers
            if wait is not Wait.STANDBY or self.spares
        ]
        if not due:
            return False
        event = due[next(self.tape, 0) % len(due)]
        if isinstance(event, DeadlinePassed):
            del self.timers[event.wait, event.epoch]
        self.decide(event)
        return True

    def put(self, key: tuple[str, ...], item: object) -> None:
        self.clock += 1
        self.queues.setdefault(key, collections.deque()).append((self.clock, item))

    def drop(self, *where: str) -> None:
        """Empty the queues whose key begins so."""
        for key in [key for key in self.queues if key[: len(where)] == where]:
            del self.queues[key]

    # --- the controller ---------------------------------------------------------------------------

    def decide(self, event: AnyEvent) -> None:
        event = msgspec.structs.replace(event, at=float(self.tick))
        self.journal.append(event)
        self.job, actions = decide(self.job, event)
        self.perform(actions)

    def perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.log.append(f"    {action}")
            if isinstance(action, Order):
                self.orders.append(action)
                self.check_plan(action)
                if action.agent in self.agents and self.agents[action.agent].alive:
                    self.put(("down", action.agent), action)
            elif isinstance(action, ArmDeadline):
                self.timers.pop((action.wait, action.epoch), None)
                self.timers[action.wait, action.epoch] = None
            elif isinstance(action, EndNode):
                self.put(("fence", action.node), None)
            elif isinstance(action, OrderNode) and self.spares:
                self.spares -= 1
                self.put(("boot", f"x{self.spares}"), None)

    def check_plan(self, order: AnyOrder) -> None:
        if not isinstance(order, Start | Prepare | Assign) or isinstance(order, Store):
            return
        plan = order.plan
        assert self.plans.setdefault(plan.epoch, plan) == plan, "two worlds of one epoch"
        assert [m.rank for m in plan.members] == list(range(self.nnodes * self.nproc))
        assert len({m.worker for m in plan.members}) == len(plan.members)

    def restart_controller(self) -> None:
        """Lose the controller and all that was on its way, and start it from its journal."""
        self.drop("up")
        self.drop("down")
        self.timers.clear()
        for cut in (0, len(self.journal) // 3, len(self.journal) // 2, len(self.journal)):
            job = Job(name="j")
            for number, event in enumerate(self.journal):
                job = saved_and_restored(job) if number == cut else job
                job, _ = decide(job, event)
            assert job == self.job, "the journal does not lead to the same job"
        self.job = saved_and_restored(job)
        self.perform(wake(self.job))
        for agent in self.agents.values():
            if agent.alive:
                for event in (agent.joined, *agent.kept.values()):
                    self.put(("up", agent.name), event)

    # --- agents -----------------------------------------------------------------------------------

    def boot(self, name: str, *, standby: bool, slot: int | None = None) -> None:
        joined = Joined(
            job="j",
            agent=name,
            node=f"n-{name}",
            address=name,
            nproc=self.nproc,
            standby=standby,
            slot=slot,
        )
        self.agents[name] = SimAgent(joined)
        self.put(("up", name), joined)

    def hear(self, agent: SimAgent, order: AnyOrder) -> None:
        match order:
            case Welcome():
                if order.launch == agent.launch and order.cast > agent.cast:
                    agent.cast = order.cast
                    for worker in agent.workers.values():
                        worker.recast(order)
                elif order.launch > agent.launch:
                    self.end_workers(agent)
                    agent.launch, agent.cast, agent.exited = order.launch, order.cast, None
                    agent.kept.clear()
                    self.put(("launch", agent.name), order)
            case Probe(probe=probe):
                if agent.workers and agent.exited is None:
                    self.up(agent, Answered(job="j", agent=agent.name, probe=probe), keep=False)
            case Stop():
                self.kill(agent)
            case _:
                for worker in list(agent.workers.values()):
                    worker.hear(order)

    def launch(self, agent: SimAgent, order: Welcome) -> None:
        if order.launch != agent.launch or not agent.alive:
            return
        for local in range(self.nproc):
            uid = f"{agent.name}/{local}"
            worker = Worker(
                uid,
                order.launch,
                self,
                total=self.total,
                nproc=self.nproc,
                sandbox=order.sandbox,
            )
            agent.workers[uid] = worker
            if order.sandbox:
                self.work(worker)
        ends = tuple(worker.endpoint for worker in agent.workers.values())
        self.up(agent, Launched(job="j", agent=agent.name, launch=order.launch, endpoints=ends))

    def up(self, agent: SimAgent, event: FromAgent, *, keep: bool = True) -> None:
        if keep:
            agent.remember(event)
        self.put(("up", agent.name), event)

    def end_workers(self, agent: SimAgent) -> None:
        """Kill the workers: of what they have sent last, the tape says how much gets through."""
        for uid, worker in list(agent.workers.items()):
            del agent.workers[uid]
            self.drop("cpu", uid)
            for other in self.living():
                self.drop("link", other.uid, uid)
                self.lose_some("link", uid, other.uid)
                self.put(("link", uid, other.uid), Frame(Kind.END, step=worker.launch))

    def kill(self, agent: SimAgent) -> None:
        """Kill everything on the node."""
        if not agent.alive:
            return
        agent.alive = False
        self.end_workers(agent)
        self.drop("down", agent.name)
        self.drop("launch", agent.name)
        self.lose_some("up", agent.name)

    def lose_some(self, *key: str) -> None:
        """Lose the end of a queue: as much as the tape says."""
        queue = self.queues.get(key)
        if queue is None:
            return
        for _ in range(next(self.tape, 0) % (len(queue) + 1)):
            queue.pop()
        if not queue:
            del self.queues[key]

    def exit(self, agent: SimAgent, code: int) -> None:
        """Let the workers end while the agent lives."""
        if agent.exited is None and agent.workers:
            self.end_workers(agent)
            agent.exited = Exited(
                job="j", agent=agent.name, launch=agent.launch, code=code, reason=f"code {code}"
            )
            self.up(agent, agent.exited)

    # --- what workers need ------------------------------------------------------------------------

    def worker(self, uid: str) -> Worker | None:
        agent = self.agents.get(uid.rpartition("/")[0])
        return None if agent is None else agent.workers.get(uid)

    def living(self) -> list[Worker]:
        return [worker for agent in self.agents.values() for worker in agent.workers.values()]

    def send(self, worker: Process, peer: str, frame: Frame) -> None:
        if self.worker(peer) is not None:
            self.put(("link", worker.uid, peer), frame)

    def tell(self, worker: Process, event: FromAgent) -> None:
        if isinstance(event, Finished):
            rank, last = worker.number(worker.here), self.total - 1
            assert worker.model == self.truth.models[last], f"{worker} ends elsewhere"
            assert worker.record == self.truth.records[rank, last], f"{worker} ends elsewhere"
            self.finished.add(worker.endpoint)
        self.up(self.agents[worker.uid.rpartition("/")[0]], event)

    def work(self, worker: Process) -> None:
        self.put(("cpu", worker.uid), worker)

    def is_up(self, endpoint: str) -> bool:
        uid, _, launch = endpoint.rpartition(":")
        worker = self.worker(uid)
        return worker is not None and worker.launch == int(launch)

    def applied(self, worker: Process, step: int) -> None:
        assert worker.model == self.truth.models[step], f"{worker} is not where {step} leads"

    def stored(self, worker: Process, step: int, *, rank: int, record: int) -> None:
        assert worker.model == self.truth.models[step], f"{worker} stores another model"
        assert record == self.truth.records[rank, step], f"{worker} stores other records of {rank}"

    def committed(self, worker: Process, step: int, *, saves: bool) -> None:
        ranks = self.saved.setdefault((worker.rank.epoch, step), {})
        ranks[worker.number(worker.here)] = saves
        assert len(set(ranks.values())) == 1, f"not all take a checkpoint after {step}: {ranks}"

    # --- the end ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the run ended as it may."""
        job = Job(name="j")
        for event in self.journal:
            job, _ = decide(job, event)
        assert job == self.job, "the journal does not lead to the same job"
        phase = self.job.phase
        if isinstance(phase, Ended):
            assert not any(agent.alive for agent in self.agents.values()), "somebody was not told"
            return
        assert isinstance(phase, Waiting), f"stuck in {phase}"
        assert self.job.ordered.nodes > 0, "no node was asked for"
        assert not self.spares, "a node that is there was not used"

    def count_saved(self) -> int:
        """Return after how many steps a checkpoint was to be taken."""
        return sum(any(ranks.values()) for ranks in self.saved.values())

    def check_saved(self) -> None:
        """Check that whoever was asked for a checkpoint, and lived, has had all take one since."""
        everybody = set(range(self.nnodes * self.nproc))
        whole = {
            step
            for (_, step), ranks in self.saved.items()
            if set(ranks) == everybody and all(ranks.values())
        }
        for endpoint, step in self.asked:
            if endpoint in self.finished:
                assert any(k > step for k in whole), f"{endpoint} asked after {step}: {whole}"


def saved_and_restored(job: Job) -> Job:
    """Return the job as a snapshot of it in a journal would have it."""
    return snapshot.restore(msgspec.json.decode(msgspec.json.encode(snapshot.save(job))))


class Truth(NamedTuple):
    """The models of the undisturbed run, by step."""

    models: dict[int, int]
    records: dict[tuple[int, int], int]


def undisturbed(size: int, total: int) -> Truth:
    """Return the models and records that a run has in which nothing happens."""
    models, records = {-1: mixed(0)}, {(rank, -1): 0 for rank in range(size)}
    for step in range(total):
        data = [mixed(models[step - 1], step, records[rank, step - 1]) for rank in range(size)]
        models[step] = mixed(models[step - 1], mixed(*data))
        for rank in range(size):
            records[rank, step] = mixed(records[rank, step - 1], rank, step)
    return Truth(models, records)
