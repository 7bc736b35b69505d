"""A real controller process, and agents that say what a test has them say.

A `Cast` is a controller and its agents. The agents are plain sockets that the test's thread drives:
they answer orders as real workers would, step by step and only when the test looks (`until`). An
agent can be held back, so that a story stands still where the test wants it to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import zmq

from tmover import wire
from tmover.controller.client import Channel, Connection, ask
from tmover.core.events import (
    Answered,
    Broken,
    Entered,
    Finished,
    FromAgent,
    Joined,
    Launched,
    Looping,
    Passed,
    Plan,
    Prepared,
    Reported,
    Verified,
    Warm,
)
from tmover.core.orders import (
    Abort,
    AnyOrder,
    Arm,
    Assign,
    Done,
    Order,
    Prepare,
    Probe,
    Revoke,
    Start,
    Stop,
    Welcome,
)
from tmover.errors import ControllerUnavailable, Refused

HEARTBEAT_S = 0.2
PATIENCE_S = 30.0
"""How long a test waits for what must come."""
QUICK = {"TMOVER_CONTROLLER_POLL_S": "0.1", "TMOVER_CONTROLLER_LEASE_S": "20"}
"""Configuration: news of nodes at once, and leases that outlive a slow machine."""

AnOrder = TypeVar("AnOrder", bound=Order)


class Controller:
    """`tmover controller` as a process of its own, which can be killed and started again."""

    def __init__(self, state: pathlib.Path, environ: Mapping[str, str] | None = None) -> None:
        self.state = state
        self.log = state.parent / f"{state.name}.log"
        self._environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environ or {})}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def argv(self) -> list[str]:
        return [
            sys.executable, "-m", "tmover", "--log-level", "DEBUG",
            "controller", "--state", str(self.state),
        ]  # fmt: skip

    def start(self) -> None:
        assert self.process is None
        before = self.address_file()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        process = self.process

        def is_up() -> bool:
            assert process.poll() is None, self.why()
            return self.address_file() not in (None, before)

        wait_for(is_up, "the controller", self.why)

    def address_file(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.state / "controller.json").read_bytes()
        return None

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it as a person would; return its exit code."""
        return self._end(number)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def run_to_end(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Start another one that is expected to end by itself."""
        quiet = [part for part in self.argv if part not in {"--log-level", "DEBUG"}]
        return subprocess.run(
            [*quiet, *arguments], env=self._environ, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def why(self) -> str:
        code = None if self.process is None else self.process.poll()
        tail = self.log.read_text().splitlines()[-20:]
        return "\n".join([f"controller's exit code {code}; its log ends:", *tail])

    def _end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(timeout=PATIENCE_S)
        self.process = None
        return code


@dataclasses.dataclass
class Rank:
    """What one scripted worker believes. Its agent has one worker per local rank."""

    epoch: int = 0
    step: int | None = -1
    doubt: int | None = None


class Agent:
    """One agent with its workers. Orders are answered at once unless their kind is held back."""

    def __init__(self, cast: Cast, joined: Joined) -> None:
        self.joined = joined
        self.name, self.node, self.job = joined.agent, joined.node, joined.job
        self.workers = [f"{self.name}/{local}" for local in range(joined.nproc)]
        self.channel = Channel(cast.state, cast.context)
        self.orders: list[AnyOrder] = []
        self.envelopes: list[wire.FromController] = []
        self.secret = b""
        self.boot = ""
        self.held: dict[type[Order], list[AnyOrder]] = {}
        self.rank = Rank()
        self.launch = self.cast = 0
        self.sandbox = False
        self.armed: Plan | None = None
        self.prepared: Plan | None = None
        self.entered: Plan | None = None
        self.stopped: Stop | None = None
        self.is_dead = False
        self.schema = {"model": "m", "optimizer": "o"}
        self._kept: dict[tuple[str, str], FromAgent] = {}
        self._next_beat = 0.0
        self.join()

    # --- what a test has it do --------------------------------------------------------------------

    def join(self) -> None:
        self.channel.send(self.joined)
        for event in list(self._kept.values()):
            self.channel.send(event)

    def say(self, event: FromAgent) -> None:
        self._kept[type(event).__name__, getattr(event, "worker", "")] = event
        self.channel.send(event)

    def hold(self, *kinds: type[Order]) -> None:
        for kind in kinds:
            self.held.setdefault(kind, [])

    def let_go(self) -> None:
        held, self.held = self.held, {}
        for orders in held.values():
            for order in orders:
                self.act(order)

    def die(self) -> None:
        """Fall silent, as with a power cut."""
        self.is_dead = True
        self.channel.close()

    @property
    def refusals(self) -> list[str]:
        return [e.text for e in self.envelopes if isinstance(e, wire.RefusedReply)]

    def last(self, kind: type[AnOrder]) -> AnOrder | None:
        return next((o for o in reversed(self.orders) if isinstance(o, kind)), None)

    def lose_link(self, *peers: str) -> None:
        """Have every worker's link to its peer of the same local rank break."""
        for local, worker in enumerate(self.workers):
            accused = tuple(f"{peer}/{local}" for peer in peers)
            self.say(
                Broken(
                    job=self.job, worker=worker, epoch=self.rank.epoch, peers=accused, reason="cut"
                )
            )

    def finish(self) -> None:
        for worker in self.workers:
            self.say(Finished(job=self.job, worker=worker, step=self.rank.step or 0))

    # --- what it does by itself -------------------------------------------------------------------

    def tick(self, now: float) -> None:
        if now < self._next_beat:
            return
        self._next_beat = now + HEARTBEAT_S
        steps = tuple(-1 if self.rank.step is None else self.rank.step for _ in self.workers)
        beat = wire.Heartbeat(job=self.job, agent=self.name, boot=self.boot, steps=steps)
        if not self.channel.send(beat) and self.channel.look() is not Connection.OPEN:
            self.channel.follow()

    def listen(self) -> None:
        while (message := self.channel.receive()) is not None:
            if isinstance(message, Order):
                self.orders.append(message)
                waiting = self.held.get(type(message))
                if waiting is not None:
                    waiting.append(message)
                else:
                    self.act(message)
                continue
            self.envelopes.append(message)
            if isinstance(message, wire.Greeting):
                self.secret, self.boot = message.secret, message.boot
            elif isinstance(message, wire.WhoAreYou):
                self.join()

    def act(self, order: AnyOrder) -> None:
        """Do as real workers would; what has been done already is not done again."""
        match order:
            case Welcome() if order.launch == self.launch and order.cast > self.cast:
                self.cast = order.cast
                self._say_warm(proof="" if order.prove else None)
            case Welcome() if order.launch != self.launch:
                self._launch(order)
            case Start() if self.rank.epoch < order.plan.epoch:
                self._start(order.plan)
            case Revoke():
                self._report(order)
            case Assign() if order.plan.epoch > self.rank.epoch:
                self.enter(order.plan, order.step, is_joiner=self.workers[0] in order.sources)
            case Probe():
                self.channel.send(Answered(job=self.job, agent=self.name, probe=order.probe))
            case Done():
                self.entered = None
            case Stop():
                self.stopped = order
            case _:
                self._move(order)

    def _move(self, order: AnyOrder) -> None:
        """Do one's part in a planned move."""
        match order:
            case Prepare():
                self.prepared = order.plan
                for worker in self.workers:
                    self.say(Prepared(job=self.job, worker=worker, epoch=order.plan.epoch))
            case Arm() if self.prepared is not None and self.prepared.epoch == order.epoch:
                self.armed = self.prepared
            case Abort() if self.armed is not None and self.armed.epoch == order.epoch:
                self.armed = self.entered = None

    def enter(self, plan: Plan, step: int, *, is_joiner: bool) -> None:
        """Stand at the commit barrier of `plan`, with the state of `step`."""
        kind = Verified if is_joiner else Entered
        self.rank.step, self.rank.doubt, self.entered = step, None, plan
        for worker in self.workers:
            self.say(kind(job=self.job, worker=worker, epoch=plan.epoch, step=step))

    def pass_barrier(self) -> None:
        assert self.entered is not None
        self.rank.epoch, self.entered, self.armed = self.entered.epoch, None, None
        for worker in self.workers:
            self.say(
                Passed(job=self.job, worker=worker, epoch=self.rank.epoch, step=self.rank.step or 0)
            )

    def _launch(self, order: Welcome) -> None:
        self._kept.clear()
        self.launch, self.sandbox, self.rank = order.launch, order.sandbox, Rank()
        self.cast = order.cast
        if order.sandbox:
            self.rank.step = None
        endpoints = tuple(f"{self.joined.address}:{40000 + i}" for i in range(self.joined.nproc))
        self.say(Launched(job=self.job, agent=self.name, launch=order.launch, endpoints=endpoints))
        if order.sandbox:
            self._say_warm()

    def _say_warm(self, proof: str | None = None) -> None:
        for worker in self.workers:
            self.say(
                Warm(
                    job=self.job,
                    worker=worker,
                    launch=self.launch,
                    schema=self.schema,
                    cast=self.cast,
                    proof=proof,
                )
            )

    def _report(self, order: Revoke) -> None:
        rank = self.rank
        for worker in self.workers:
            self.say(
                Reported(
                    job=self.job, worker=worker, of=order.epoch, epoch=rank.epoch, step=rank.step,
                    doubt=rank.doubt,
                )
            )  # fmt: skip

    def _start(self, plan: Plan) -> None:
        self.rank.epoch = plan.epoch
        for worker in self.workers:
            self.say(Looping(job=self.job, worker=worker, launch=self.launch, schema=self.schema))


class Cast:
    """The controller, its agents, and the clock that drives them."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.state = controller.state
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.agents: list[Agent] = []
        self.jobs: list[str] = []
        self.barrier_is_shut = False
        """Whether those who stand at a commit barrier are kept from passing it together."""

    def submit(self, nnodes: int, nproc: int = 1) -> str:
        request = wire.SubmitRequest(nnodes=nnodes, nproc=nproc, owner="ann")
        answer = ask(self.state, request, PATIENCE_S)
        assert isinstance(answer, wire.Accepted)
        self.jobs.append(answer.job)
        return answer.job

    def join(
        self, job: str, node: str, *, slot: int | None = None, standby: bool = False, nproc: int = 1
    ) -> Agent:
        number = len(self.agents)
        joined = Joined(
            job=job, agent=f"{node}-{number:08x}", node=node, address=f"127.0.0.{number + 2}",
            nproc=nproc, standby=standby, slot=slot,
        )  # fmt: skip
        agent = Agent(self, joined)
        self.agents.append(agent)
        return agent

    def form(self, nnodes: int, *, standbys: int = 0, nproc: int = 1) -> tuple[str, list[Agent]]:
        """Submit a job and bring it to training; return it and its agents, standbys last."""
        job = self.submit(nnodes, nproc)
        for number in range(nnodes):
            self.join(job, f"node{number + 1}", slot=number, nproc=nproc)
        self.until(lambda: self.status(job).phase == "training", "training")
        for number in range(nnodes, nnodes + standbys):
            self.join(job, f"node{number + 1}", standby=True, nproc=nproc)
        self.until(lambda: self.warm(job) == standbys, "warm standbys")
        return job, list(self.agents)

    def cancel_all(self) -> None:
        """Cancel the jobs that were submitted here, so that nothing waits for them any more."""
        for job in self.jobs:
            with contextlib.suppress(Refused, ControllerUnavailable):
                ask(self.state, wire.CancelRequest(job=job, reason="the test is over"))

    def all_status(self) -> Sequence[wire.JobStatus]:
        answer = ask(self.state, wire.StatusRequest(), PATIENCE_S)
        assert isinstance(answer, wire.StatusReply)
        return answer.jobs

    def status(self, job: str) -> wire.JobStatus:
        answer = ask(self.state, wire.StatusRequest(job=job), PATIENCE_S)
        assert isinstance(answer, wire.StatusReply)
        return answer.jobs[0]

    def nodes(self, job: str) -> list[str]:
        return [slot.node for slot in self.status(job).slots]

    def warm(self, job: str) -> int:
        return sum(standby.state == "warm" for standby in self.status(job).standbys)

    def restart(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Kill the controller, have something happen that it cannot hear, and start it again."""
        self.controller.kill()
        meanwhile()
        self.controller.start()

    def until(self, is_true: Callable[[], bool], what: str) -> None:
        """Let everybody act until it is so."""

        def look() -> bool:
            self.turn()
            return is_true()

        wait_for(look, what, self.describe)

    def turn(self) -> None:
        """Let every agent hear, and beat if it is time; let full barriers pass."""
        living = [agent for agent in self.agents if not agent.is_dead]
        poller = zmq.Poller()
        for agent in living:
            poller.register(agent.channel.socket, zmq.POLLIN)
        poller.poll(20)
        for agent in living:
            agent.listen()
            if agent.stopped is None:
                agent.tick(time.monotonic())
        if not self.barrier_is_shut:
            self.pass_barriers()

    def switch(self, step: int = 7) -> None:
        """Let every agent that is armed stand at the boundary after `step`."""
        for agent in self.agents:
            if agent.armed is not None and agent.entered is None and not agent.is_dead:
                agent.enter(agent.armed, step, is_joiner=agent.rank.step is None)

    def at_barrier(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.entered is not None and not agent.is_dead]

    def pass_barriers(self) -> None:
        """Let those pass that all stand at the barrier of one plan; a leaver has no part in it."""
        there = self.at_barrier()
        for plan in {
            agent.entered.epoch: agent.entered for agent in there if agent.entered
        }.values():
            wanted = {wire.agent_of(member.worker) for member in plan.members}
            ready = [agent for agent in there if agent.entered == plan and agent.name in wanted]
            if len(ready) == len(wanted):
                for agent in ready:
                    agent.pass_barrier()

    def describe(self) -> str:
        said = [f"{agent.name}: {agent.orders[-3:]}" for agent in self.agents]
        return "\n".join([*said, self.controller.why()])

    def close(self) -> None:
        for agent in self.agents:
            if not agent.is_dead:
                agent.channel.close()
        self.context.destroy(linger=0)


def wait_for(
    is_true: Callable[[], bool], what: str, why: Callable[[], str], timeout_s: float = PATIENCE_S
) -> None:
    """Poll until it is so, or fail showing what was seen instead."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            message = f"waited {timeout_s} s for {what}\n{why()}"
            raise AssertionError(message)
        time.sleep(0.01)


@contextlib.contextmanager
def on_stage(controller: Controller) -> Iterator[Cast]:
    """Yield a cast for a running controller; in the end take everybody off the stage."""
    cast = Cast(controller)
    try:
        yield cast
    finally:
        if controller.process is not None:
            cast.cancel_all()
        cast.close()


@contextlib.contextmanager
def staged(directory: pathlib.Path, **environ: str) -> Iterator[Cast]:
    """Yield a cast with a controller of its own."""
    controller = Controller(directory / "state", {**QUICK, **environ})
    controller.start()
    try:
        with on_stage(controller) as cast:
            yield cast
    finally:
        if controller.process is not None:
            controller.signal(signal.SIGCONT)
            controller.stop()


def reachable(state: pathlib.Path) -> bool:
    with contextlib.suppress(ControllerUnavailable):
        ask(state, wire.StatusRequest(), 1.0)
        return True
    return False


def journaled(state: pathlib.Path, job: str) -> list[str]:
    """Return the kinds of what the journal of a job holds."""
    lines = (state / "journal" / f"{job}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line)["entry"]["type"] for line in lines]


def kinds(orders: Sequence[AnyOrder]) -> list[str]:
    return [type(order).__name__ for order in orders]
