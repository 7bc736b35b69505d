"""One agent of a crowd, and what is written down of a failure: for `bench/crowd.py`."""

from __future__ import annotations

import dataclasses

import zmq

from tmover import wire
from tmover.core.events import Answered, FromAgent, Joined, Launched, Looping, Reported, Warm
from tmover.core.orders import AnyOrder, Probe, Revoke, Start, Welcome
from tmover.core.progress import Activity, Progress

FIRST_RETRY_S, RETRY_S = 0.1, 2.0
"""An agent that is not known tries again after the first, then after twice that, up to the last."""
SCHEMA = {"model": "m", "optimizer": "o"}
ENDPOINTS = ("10.0.0.1:40000",)


@dataclasses.dataclass
class Sample:
    """One failure: when what came of it was there, in seconds after it was said."""

    job: str
    kind: str
    victim: str
    began: float
    survivors: int
    revoked: list[float] = dataclasses.field(default_factory=list)
    assigned: list[float] = dataclasses.field(default_factory=list)
    done: list[float] = dataclasses.field(default_factory=list)


class Agent:
    """One agent with one worker."""

    def __init__(self, socket: zmq.Socket[bytes], joined: Joined) -> None:
        self.joined = joined
        self.job, self.name = joined.job, joined.agent
        self.worker = f"{joined.agent}/0"
        self.boot = ""
        self.is_known = False
        self.is_silent = False
        """Whether it answers nothing any more, as a node without power."""
        self.launch = 0
        self.retry_s = FIRST_RETRY_S
        self.rank: int | None = None
        self.epoch, self.step = 0, 7
        self.is_standby = joined.standby
        self.kept: dict[str, FromAgent] = {}
        self.sent = self.answered = self.asked = 0
        self.said: tuple[object, ...] = ()
        self.words: list[bytes] = []
        """The last heartbeat, and what it says: the agents are to cost less than the controller."""
        self.heard = b""
        """What it is answered, as it was said last."""
        self.socket = socket

    def say(self, message: wire.ToController, *, keep: bool = False) -> bool:
        if keep:
            assert not isinstance(message, (wire.Request, wire.Heartbeat, wire.Program))
            self.kept[type(message).__name__] = message
        try:
            self.socket.send_multipart(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            self.is_known = False
            return False
        return True

    def say_all(self) -> bool:
        return all(self.say(event) for event in [self.joined, *self.kept.values()])

    def beat(self, step: int) -> None:
        if not self.is_known:  # what it beats before it is greeted may get no answer
            self.say_all()
            return
        progress: tuple[Progress | None, ...] = (None,)
        if self.rank is not None:
            progress = (
                Progress(
                    rank=self.rank, step=step, activity=Activity.STEP.value, steps=20,
                    median_s=0.5, own_s=0.3, epoch=self.epoch,
                    waited={(self.rank + 1) % 8: 0.1, (self.rank + 2) % 8: 0.2},
                ),
            )  # fmt: skip
        said = (self.boot, step, self.rank, self.epoch)
        if said != self.said:
            beat = wire.Heartbeat(
                job=self.job, agent=self.name, boot=self.boot, steps=(step,), phase="step",
                progress=progress,
            )  # fmt: skip
            self.said, self.words = said, wire.encode(beat)
        try:
            self.socket.send_multipart(self.words, zmq.DONTWAIT)
        except zmq.Again:
            self.is_known = False
        else:
            self.sent += 1

    def act(self, order: AnyOrder) -> None:
        """Do what concerns nobody else."""
        job, worker = self.job, self.worker
        match order:
            case Welcome() if order.launch != self.launch:
                self._launch(order)
            case Welcome() if order.sandbox:
                self._say_warm(order, proof="" if order.prove else None)
            case Start():
                self.epoch, self.rank = order.plan.epoch, order.plan.rank_of(worker)
                looping = Looping(job=job, worker=worker, launch=self.launch, schema=SCHEMA)
                self.say(looping, keep=True)
            case Probe():
                self.say(Answered(job=job, agent=self.name, probe=order.probe))

    def report(self, order: Revoke) -> None:
        self.say(
            Reported(
                job=self.job, worker=self.worker, of=order.epoch, epoch=self.epoch,
                step=self.step, doubt=None,
            )
        )  # fmt: skip

    def _launch(self, order: Welcome) -> None:
        self.launch = order.launch
        self.kept.clear()
        self.say(
            Launched(job=self.job, agent=self.name, launch=order.launch, endpoints=ENDPOINTS),
            keep=True,
        )
        if order.sandbox:
            self._say_warm(order)

    def _say_warm(self, order: Welcome, proof: str | None = None) -> None:
        self.say(
            Warm(
                job=self.job, worker=self.worker, launch=order.launch, schema=SCHEMA,
                cast=order.cast, proof=proof,
            ),
            keep=True,
        )  # fmt: skip
