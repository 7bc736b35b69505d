"""Agents by the thousand, for `bench/controller.py`: real sockets, nothing behind them.

A `Crowd` is one process with the agents of some jobs. Each agent has a CURVE connection of its own
and says what a real one with one worker would: it joins, beats, answers orders at once and passes
every barrier with the others of its job. Only what is said is real; nothing is trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import multiprocessing.connection as mp
import pathlib
import select
import time
from collections.abc import Callable, Iterator

import zmq

from agent import FIRST_RETRY_S, RETRY_S, Agent, Sample
from tmover import wire
from tmover.controller import keys
from tmover.controller.client import Address, read_address
from tmover.core.events import (
    Broken,
    Entered,
    Joined,
    Left,
    Passed,
    Stepped,
    Verified,
)
from tmover.core.orders import AnyOrder, Assign, Done, Revoke, Stop

BEAT_S = 1.0
STEP_S = 10.0
_TICK_S = 0.005


@dataclasses.dataclass
class Counts:
    """What a crowd has to say of itself."""

    agents: int = 0
    known: int = 0
    training: int = 0
    """Members that have been told to start, or that all have passed."""
    warm: int = 0
    sent: int = 0
    answered: int = 0
    asked: int = 0
    """Heartbeats that were answered with a question."""


class Crowd:
    """The agents of one process, and the connection to whoever leads them."""

    def __init__(self, state: pathlib.Path, lead: mp.Connection) -> None:
        self._state = state
        self._lead = lead
        self._keys = keys.read_client(state)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 16000
        self._address: Address = read_address(state)
        self._epoll = select.epoll()
        self._epoll.register(lead.fileno(), select.EPOLLIN)
        self._agents: dict[int, Agent] = {}
        """By the descriptor of their socket."""
        self._members: dict[str, dict[str, Agent]] = {}
        """All agents, by job and name."""
        self._due: list[tuple[float, int, int]] = []
        self._barrier: dict[tuple[str, int], list[Agent]] = {}
        self._sample: Sample | None = None
        self._count = 0
        self._is_over = False
        self._is_beating = True
        self._began = time.monotonic()

    def connect(self) -> zmq.Socket[bytes]:
        """Return a new connection, set as a real agent sets it."""
        sock: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        sock.linger, sock.immediate = 0, 1
        sock.heartbeat_ivl, sock.heartbeat_timeout = 4000, 5000
        sock.reconnect_ivl, sock.reconnect_ivl_max = 50, 1000
        sock.curve_serverkey = self._keys.server
        sock.curve_publickey, sock.curve_secretkey = self._keys.own
        sock.connect(self._address.address)
        return sock

    def run(self) -> None:
        """Do what the lead says until it says that it is over."""
        while not self._is_over:
            for fd, _ in self._epoll.poll(_TICK_S):
                if fd == self._lead.fileno():
                    self._obey()
                elif fd in self._agents:
                    self._listen(self._agents[fd])
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, fd = heapq.heappop(self._due)
                self._tick(fd, now)
        self._context.destroy(linger=0)

    # --- what the lead asks -----------------------------------------------------------------------

    def _obey(self) -> None:
        command, *arguments = self._lead.recv()
        ask: Callable[..., object] = getattr(self, f"do_{command}")
        answer = ask(*arguments)
        if answer is not None:
            self._lead.send(answer)

    def do_join(self, job: str, nodes: int, standbys: int) -> str:
        """Have the agents of a job join, its standbys as well."""
        for number in range(nodes + standbys):
            self._add(job, number if number < nodes else None)
        return "joined"

    def do_counts(self) -> Counts:
        every = list(self._agents.values())
        return Counts(
            agents=len(every),
            known=sum(agent.is_known for agent in every),
            training=sum(agent.rank is not None for agent in every),
            warm=sum("Warm" in agent.kept for agent in every),
            sent=sum(agent.sent for agent in every),
            answered=sum(agent.answered for agent in every),
            asked=sum(agent.asked for agent in every),
        )

    def do_beat(self) -> str:
        self._is_beating = True
        return "so be it"

    def do_fall_silent(self) -> str:
        self._is_beating = False
        return "so be it"

    def do_outage(self) -> str:
        """Take no agent for known any more: the controller is about to be killed."""
        for agent in self._agents.values():
            agent.is_known, agent.boot = False, ""
        return "so be it"

    def do_fail(self, job: str, kind: str) -> None:
        """Have a member of the job be lost; the answer is the `Sample`, once all train again."""
        seated = [agent for agent in self._members[job].values() if agent.rank is not None]
        self._count += 1
        victim = seated[self._count * 7 % len(seated)]
        began = time.monotonic()
        self._sample = Sample(job, kind, victim.name, began, len(seated) - 1)
        victim.rank = None
        if kind == "left":
            victim.say(Left(job=job, agent=victim.name, code=-9, reason="its node is switched off"))
            return
        victim.is_silent = True
        for agent in [one for one in seated if one is not victim][:2]:
            agent.say(
                Broken(
                    job=job, worker=agent.worker, epoch=agent.epoch, peers=(victim.worker,),
                    reason="connection reset",
                )
            )  # fmt: skip

    def do_over(self) -> None:
        self._is_over = True

    # --- agents -----------------------------------------------------------------------------------

    def _add(self, job: str, slot: int | None) -> None:
        known = self._members.setdefault(job, {})
        self._count += 1
        node = f"{job}n{self._count:05d}"
        joined = Joined(
            job=job, agent=f"{node}-{self._count:08x}", node=node, address="10.0.0.1", nproc=1,
            standby=slot is None, slot=slot,
        )  # fmt: skip
        agent = Agent(self.connect(), joined)
        known[joined.agent] = agent
        fd = agent.socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._agents[fd] = agent
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        phase = self._count * 0.618 % BEAT_S
        heapq.heappush(self._due, (time.monotonic() + 0.05 + phase * 0.5, self._count, fd))

    def _drop(self, agent: Agent) -> None:
        fd = agent.socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._epoll.unregister(fd)
        del self._agents[fd], self._members[agent.job][agent.name]
        agent.socket.close(linger=0)

    def _tick(self, fd: int, now: float) -> None:
        agent = self._agents.get(fd)
        if agent is None:
            return
        if self._is_beating and not agent.is_silent:
            agent.beat(int((now - self._began) / STEP_S) + 8)
        self._count += 1
        agent.retry_s = FIRST_RETRY_S if agent.is_known else min(2 * agent.retry_s, RETRY_S)
        wait_s = BEAT_S if agent.is_known else agent.retry_s
        heapq.heappush(self._due, (now + wait_s, self._count, fd))
        self._listen(agent)  # sending may have swallowed the edge that a poll would show

    def _listen(self, agent: Agent) -> None:
        while not agent.socket.closed:
            try:
                frames = agent.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if frames[-1] == agent.heard:
                agent.answered += 1
                continue
            message = wire.decode_order(frames)
            if isinstance(message, wire.Heard):
                agent.heard = frames[-1]
            self._hear(agent, message)

    def _hear(self, agent: Agent, message: wire.FromController) -> None:
        if isinstance(message, wire.Heard):
            agent.answered += 1
        elif isinstance(message, wire.WhoAreYou):
            agent.boot = message.boot
            agent.asked = agent.sent - agent.answered  # over a connection that broke
            agent.is_known = False
            agent.say_all()
        elif isinstance(message, wire.Greeting):
            agent.boot, agent.is_known = message.boot, True
        elif not isinstance(message, (wire.Siblings, wire.Reply)):
            if not agent.is_silent or isinstance(message, Stop):
                self._act(agent, message)
        elif isinstance(message, wire.RefusedReply):
            raise AssertionError(message.text)

    # --- orders -----------------------------------------------------------------------------------

    def _act(self, agent: Agent, order: AnyOrder) -> None:
        now = time.monotonic()
        sample = self._sample if self._sample and self._sample.job == agent.job else None
        match order:
            case Revoke():
                if sample:
                    sample.revoked.append(now - sample.began)
                agent.report(order)
            case Assign() if order.plan.epoch > agent.epoch:
                if sample:
                    sample.assigned.append(now - sample.began)
                self._enter(agent, order)
            case Done() if sample:
                sample.done.append(now - sample.began)
                self._finish_sample(sample)
            case Stop():
                self._drop(agent)
                self._add(agent.job, None)
            case _:
                agent.act(order)

    def _enter(self, agent: Agent, order: Assign) -> None:
        """Stand at the barrier; all pass it together."""
        plan = order.plan
        agent.step = order.step
        kind = Verified if agent.worker in order.sources else Entered
        agent.say(kind(job=agent.job, worker=agent.worker, epoch=plan.epoch, step=order.step))
        there = self._barrier.setdefault((agent.job, plan.epoch), [])
        there.append(agent)
        if len(there) < len(plan.members):
            return
        ranks = {member.worker: member.rank for member in plan.members}
        for one in there:
            one.epoch, one.rank = plan.epoch, ranks[one.worker]
            one.kept.pop("Warm", None)
            passed = Passed(job=one.job, worker=one.worker, epoch=plan.epoch, step=one.step)
            one.say(passed, keep=True)
        there[0].say(
            Stepped(
                job=agent.job, worker=plan.members[0].worker, epoch=plan.epoch, step=order.step + 1
            )
        )
        del self._barrier[agent.job, plan.epoch]

    def _finish_sample(self, sample: Sample) -> None:
        if len(sample.done) == sample.survivors + 1:
            self._sample = None
            self._lead.send(sample)


def work(state: pathlib.Path, lead: mp.Connection) -> None:
    """Be a crowd: the body of a process."""
    with contextlib.suppress(EOFError):
        Crowd(state, lead).run()


def chunks(total: int, parts: int) -> Iterator[int]:
    """Yield `total` in `parts` that are as equal as can be."""
    for part in range(parts):
        yield total * (part + 1) // parts - total * part // parts
