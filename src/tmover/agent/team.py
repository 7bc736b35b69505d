"""The workers of one node, launch after launch: started, introduced, heard, watched and ended."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import zmq

from tmover import wire
from tmover.agent.crew import Crew, Loss
from tmover.agent.intercom import Intercom, new_address
from tmover.agent.launcher import Launcher, WorkerCommand
from tmover.config import AgentConfig
from tmover.core.events import CARRIED_ALONG, FromAgent, Joined
from tmover.core.orders import AnyOrder, Welcome
from tmover.process import SPARED

_LAST_WORD_MS = 20


class Team:
    """Has a crew and a line to it, or neither, between two launches."""

    def __init__(self, launcher: Launcher, joined: Joined, config: AgentConfig) -> None:
        self._launcher = launcher
        self._joined = joined
        self._config = config
        self._crew: Crew | None = None
        self._intercom: Intercom | None = None
        self._address = ""
        self._early: dict[int, None] = {}
        """Signals that came before the launch had trained: workers that come later get them."""

    @property
    def command(self) -> WorkerCommand:
        """What workers run, from the next launch on."""
        return self._launcher.command

    @command.setter
    def command(self, command: WorkerCommand) -> None:
        self._launcher.command = command

    @property
    def is_running(self) -> bool:
        """Whether there is a launch that has not been ended."""
        return self._crew is not None

    @property
    def has_trained(self) -> bool:
        """Whether a worker of the launch has reported a step."""
        return self._intercom is not None and bool(self._intercom.pulses)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Readable when a worker has said something."""
        return () if self._intercom is None else (self._intercom.socket,)

    @property
    def descriptors(self) -> Sequence[int]:
        """Readable when a process of the launch has ended."""
        return () if self._crew is None else self._crew.descriptors

    @property
    def endpoints(self) -> tuple[str, ...] | None:
        """Where the workers listen, or None before all do."""
        return None if self._intercom is None else self._intercom.endpoints

    def start(self) -> None:
        """Start a launch. The first time this is done before there is any thread."""
        self._address = new_address()
        launch = self._launcher.launch(
            {
                "TMOVER_AGENT": self._address,
                "TMOVER_AGENT_PID": str(os.getpid()),
                "TMOVER_ADDRESS": self._joined.address,
            }
        )
        self._crew = Crew(launch, nproc=self._joined.nproc, stopped_s=self._config.stopped_s)

    def listen(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Open the line that the workers of the launch were told of."""
        joined = self._joined
        self._intercom = Intercom(context, self._address, agent=joined.agent, nproc=joined.nproc)

    def lend(self, joined: Joined) -> None:
        """Be another job's from now on; the workers are to hear it when they are introduced."""
        self._joined = joined
        self._early.clear()
        if self._intercom is not None:
            self._intercom.renew(joined.agent)

    def introduce(self, greeting: wire.Greeting, welcome: Welcome) -> None:
        """Tell the workers who they are."""
        if self._intercom is not None:
            self._intercom.introduce(greeting, welcome)

    def relay(self, order: AnyOrder) -> None:
        """Pass an order on to the workers."""
        if self._intercom is not None:
            self._intercom.relay(order)

    def reassure(self) -> None:
        """Tell the workers that a controller answers."""
        if self._intercom is not None:
            joined = self._joined
            self._intercom.reassure(wire.Heard(job=joined.job, agent=joined.agent, boot=""))

    def hear(self) -> Iterator[FromAgent]:
        """Yield what workers have to say to the controller."""
        if self._intercom is None:
            return
        for message in self._intercom.receive():
            if not isinstance(message, wire.Hello):
                yield message
            elif self._crew is not None:
                self._crew.add(message.local_rank, message.pid)
                for number in self._early:
                    self._crew.signal(number, only=message.local_rank)

    def lives(self) -> bool:
        """Whether there is a launch, and all its workers live."""
        return self._crew is not None and self._crew.lives()

    def signal(self, number: int) -> None:
        """Pass a signal on to the workers; SIGUSR1 and SIGUSR2 also to those that come yet."""
        if number in SPARED and not self.has_trained:
            self._early[number] = None
        if self._crew is not None:
            self._crew.signal(number)

    def loss(self, now: float) -> Loss | None:
        """Return how the launch ended, or None while it goes on."""
        return None if self._crew is None else self._crew.loss(now)

    def last_words(self, loss: Loss) -> tuple[Loss, list[FromAgent]]:
        """Return what the workers said before their end, and the loss with the reason one gave."""
        if self._intercom is None:
            return loss, []
        said = list(self.hear())
        while loss.code > 0 and self._intercom.socket.poll(_LAST_WORD_MS):
            said.extend(self.hear())
        return self.confession() or loss, said

    def confession(self) -> Loss | None:
        """Return how the launch will end if a worker has said that its script has failed."""
        pulses = {} if self._intercom is None else self._intercom.pulses
        for local_rank, pulse in sorted(pulses.items()):
            ends = ((wire.ERROR_PHASE, pulse.code), (wire.CARRIED_PHASE, CARRIED_ALONG))
            for kind, code in ends:
                if pulse.phase.startswith(kind):
                    why = pulse.phase.removeprefix(kind)
                    return Loss(code, f"worker {local_rank} failed: {why}", local_rank)
        return None

    def heartbeat(self) -> wire.Heartbeat:
        """Return how far the workers are."""
        intercom = self._intercom
        return wire.Heartbeat(
            job=self._joined.job,
            agent=self._joined.agent,
            steps=() if intercom is None else intercom.steps,
            phase="no workers" if intercom is None else intercom.phase,
            progress=() if intercom is None else intercom.progress,
        )

    def kill(self) -> None:
        """Kill what is left of the launch. It acts no more, though it may take time to be gone."""
        if self._crew is not None:
            self._crew.kill()

    def end(self) -> None:
        """Kill what is left of the launch, and hear nothing of it any more."""
        if self._crew is not None:
            self._crew.end()
            self._crew = None
        if self._intercom is not None:
            self._intercom.close()
            self._intercom = None
