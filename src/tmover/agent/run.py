"""The agent's loop: one thread, one poller, between the controller and the workers of one node.

The workers are started at once, before there is any socket: they import while the agent joins. Who
they are is the controller's to say (`Welcome`); a later `Welcome` with a higher launch number means
that they are ended and started afresh. An agent whose workers are gone says so (`Exited`) and waits
for what the controller makes of it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from typing import NamedTuple

import msgspec
import zmq

from tmover import wire
from tmover.agent import programs
from tmover.agent.crew import Loss
from tmover.agent.launcher import Launcher
from tmover.agent.orphans import end_children, reap_children
from tmover.agent.signals import SignalPipe
from tmover.agent.team import Team
from tmover.agent.uplink import Uplink
from tmover.config import Config, is_slurm_job
from tmover.core.events import Answered, Exited, Joined, Launched, Left
from tmover.core.orders import (
    Abort,
    Arm,
    Assign,
    Done,
    Lend,
    Prepare,
    Probe,
    Revoke,
    Start,
    Stop,
    Welcome,
)
from tmover.environment import AgentEnvironment
from tmover.errors import ConfigError, ControllerUnavailable, Refused
from tmover.process import adopt_orphans

logger = logging.getLogger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_RELAYED = (Start, Prepare, Arm, Abort, Revoke, Assign, Done)
_FLUSH_S = 1.0
_NOTHING_TO_SAVE_S = 1.0
"""How long workers that have trained no step may take to end when their job has failed."""
_REASSURANCES = 8
"""How often within `fence_after_s` workers are told that the controller is there."""


class Exit(NamedTuple):
    """How the agent ends."""

    code: int
    reason: str


def run(place: AgentEnvironment, config: Config, launcher: Launcher, joined: Joined) -> Exit:
    """Serve the job on this node until its part is over. Leaves no process behind.

    Raises `ConfigError`, `ControllerUnavailable` or `Refused` if it cannot join the job.
    """
    adopt_orphans()
    team = Team(launcher, joined, config.agent)
    with SignalPipe(_PASSED_ON) as signals:
        team.start()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        lent: Lend | None = None
        try:
            team.listen(context)
            while True:
                with contextlib.closing(Uplink(place, joined, config.agent, context)) as uplink:
                    agent = Agent(
                        config, joined, team=team, uplink=uplink, context=context, lent=lent
                    )
                    end = agent.serve(signals)
                if isinstance(end, Exit):
                    return end
                lent = end
                joined = msgspec.structs.replace(
                    joined, job=lent.to, agent=lent.name, standby=True, slot=None, lent_by=lent.job
                )
                team.lend(joined)
        finally:
            team.end()
            launcher.close()
            end_children()
            context.destroy(linger=0)


class Agent:
    """Relays between controller and workers, and sees to it that both know of each other's end."""

    def __init__(
        self,
        config: Config,
        joined: Joined,
        *,
        team: Team,
        uplink: Uplink,
        context: zmq.Context[zmq.Socket[bytes]],
        lent: Lend | None = None,
    ) -> None:
        """`lent`: how it has come to this job, from another one, with that one's workers."""
        self._lent = lent
        self._config = config.agent
        self._fence_after_s = config.worker.fence_after_s
        self._joined = joined
        self._team = team
        self._uplink = uplink
        self._context = context
        self._greeting: wire.Greeting | None = None
        self._welcome: Welcome | None = None
        self._launched = False
        self._loss: Loss | None = None
        self._stop: Stop | None = None
        self._signal: int | None = None
        self._exit: Exit | Lend | None = None
        self._refusal = ""
        self._started_at = self._watch_at = self._reassure_at = time.monotonic()
        self._stop_by = math.inf

    def serve(self, signals: SignalPipe) -> Exit | Lend:
        """Serve until the end, or until this node is to be another job's."""
        while self._exit is None:
            ready = self._wait(signals)
            now = time.monotonic()
            for number in signals.take():
                self._on_signal(number)
            self._hear_workers()
            self._pass_confession_on()
            if now >= self._watch_at or not ready.isdisjoint(self._team.descriptors):
                self._watch_at = now + self._config.watch_s
                self._look_after_workers(now)
            for message in self._uplink.receive(now):
                self._on_message(message, now)
            self._uplink.tick(now, self._team.heartbeat())
            self._mind_the_time(now)
        return self._exit

    def _wait(self, signals: SignalPipe) -> set[object]:
        """Wait until something can be done; return the sockets and descriptors that are ready."""
        poller = zmq.Poller()
        poller.register(signals.fileno(), zmq.POLLIN)
        for source in (*self._uplink.sockets, *self._team.sockets, *self._team.descriptors):
            poller.register(source, zmq.POLLIN)
        wait_s = max(0.0, min(self._uplink.due, self._watch_at) - time.monotonic())
        return {ready for ready, _ in poller.poll(math.ceil(wait_s * 1000))}

    def _mind_the_time(self, now: float) -> None:
        """Do what is due because time has passed. Raises if the agent cannot join."""
        uplink = self._uplink
        if not uplink.ever_known:
            if uplink.wrong_key():
                raise ConfigError(uplink.explain())
            if now - self._started_at > self._config.join_s:
                if self._refusal:
                    msg = f"{self._refusal}: submit its script with `tmover submit`"
                    raise Refused(msg)
                raise ControllerUnavailable(uplink.explain())
        elif self._awaits_program and now - self._started_at > self._config.join_s:
            msg = f"no node of job {self._joined.job} has said what it runs"
            raise Refused(msg)
        if self._stop is not None and (not self._team.is_running or now >= self._stop_by):
            self._team.end()
            self._exit = Exit(self._stop.code, self._stop.reason)
        silent_since = uplink.silent_since
        if silent_since is None and now >= self._reassure_at:
            self._reassure_at = now + self._fence_after_s / _REASSURANCES
            self._team.reassure()
        abandoned = silent_since is not None and now - silent_since > self._fence_after_s
        if self._exit is None and self._loss is not None and abandoned:
            code = shell_code(self._loss.code) or 1
            self._exit = Exit(code, f"{self._loss.reason}, and no controller answers")

    # --- what is heard ----------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        """Pass a signal on. A Ctrl-C after another does not wait for the workers any more."""
        at_once = self._signal is not None and number == signal.SIGINT
        if number in _ENDING and (at_once or not self._team.is_running):
            self._team.end()
            self._leave(number, f"ended by {signal.Signals(number).name}")
        self._team.signal(number)
        if number in _ENDING:
            self._signal = self._signal or number

    def _hear_workers(self) -> None:
        for event in self._team.hear():
            if event.job == self._joined.job:  # else it was said in the job before
                self._uplink.tell(event)
        endpoints = self._team.endpoints
        if endpoints is not None and self._welcome is not None and not self._launched:
            self._launched = True
            self._uplink.tell(
                Launched(
                    job=self._joined.job,
                    agent=self._joined.agent,
                    launch=self._welcome.launch,
                    endpoints=endpoints,
                )
            )

    def _on_message(self, message: wire.FromController, now: float) -> None:
        if isinstance(message, wire.Greeting):
            self._on_greeting(message)
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Probe):
            self._on_probe(message)
        elif isinstance(message, Stop):
            self._on_stop(message, now)
        elif isinstance(message, Lend):
            self._on_lend(message)
        elif isinstance(message, _RELAYED):
            self._team.relay(message)
        elif isinstance(message, wire.RefusedReply):
            if message.is_unknown and is_slurm_job(self._joined.job) and self._welcome is None:
                self._refusal = message.text  # Slurm may start it before the controller is told
                return
            if self._welcome is None:
                raise Refused(message.text)
            logger.warning("the controller refused: %s", message.text)

    @property
    def _awaits_program(self) -> bool:
        """Whether this node was lent, and does not know yet what it is to run."""
        return self._lent is not None and self._greeting is None

    def _on_greeting(self, greeting: wire.Greeting) -> None:
        if self._awaits_program and greeting.program is None:
            self._uplink.repeat()  # a controller that was started again is told it by others first
            return
        program = greeting.program or (self._greeting and self._greeting.program)
        self._greeting = msgspec.structs.replace(greeting, program=program)
        if greeting.pool and (self._lent is None or self._welcome is not None):
            self._uplink.answer(programs.describe(self._joined, self._team.command))

    def _on_probe(self, probe: Probe) -> None:
        if self._team.lives():
            job, agent = self._joined.job, self._joined.agent
            self._uplink.answer(Answered(job=job, agent=agent, probe=probe.probe))

    def _on_lend(self, lend: Lend) -> None:
        if self._stop is None and self._signal is None:
            logger.info("lent to job %s", lend.to)
            self._exit = lend

    def _move_in(self, lent: Lend, program: wire.Program, welcome: Welcome) -> None:
        """Run what this job runs: the workers another job has warmed, if they can do it."""
        own = programs.describe(self._joined, self._team.command)
        self._team.command = programs.take_over(program, self._joined.nproc)
        can_stay = welcome.sandbox and not lent.afresh and programs.is_alike(own, program)
        if can_stay and self._team.is_running and self._team.lives():
            logger.info("the workers go on in job %s", welcome.job)
            return
        logger.info("the workers are started afresh for job %s", welcome.job)
        self._team.end()
        self._team.start()
        self._team.listen(self._context)

    def _on_welcome(self, welcome: Welcome) -> None:
        before = self._welcome
        is_ending = self._stop is not None or self._signal is not None
        if self._greeting is not None and before is not None and _is_recast(welcome, before):
            logger.info("the script is run again, for slot %s", welcome.slot)
            self._welcome = welcome
            self._team.introduce(self._greeting, welcome)
            return
        if (
            self._greeting is None
            or is_ending
            or (before is not None and welcome.launch <= before.launch)
        ):
            return
        if welcome.nproc != self._joined.nproc:
            msg = (
                f"job {welcome.job} has {welcome.nproc} workers per node, this node was started "
                f"with --nproc-per-node {self._joined.nproc}"
            )
            raise ConfigError(msg)
        logger.info("launch %s in slot %s", welcome.launch, welcome.slot)
        self._welcome = welcome
        if before is None and self._lent is not None and self._greeting.program is not None:
            try:
                self._move_in(self._lent, self._greeting.program, welcome)
            except Refused as error:  # said, so that no other job's standby ends of it unheard
                self._team.end()
                self._part(1, str(error), code=error.exit_code)
                return
        if before is not None:
            self._team.end()
            self._uplink.forget()
            self._loss, self._launched = None, False
            self._team.start()
            self._team.listen(self._context)
        self._team.introduce(self._greeting, welcome)
        if self._loss is not None:  # they ended before it was known which launch they were
            self._report(self._loss)

    def _on_stop(self, stop: Stop, now: float) -> None:
        if self._stop is None:
            logger.info("told to stop with code %s: %s", stop.code, stop.reason)
            patience_s = self._config.stop_s
            if stop.code and not self._team.has_trained:
                patience_s = min(patience_s, _NOTHING_TO_SAVE_S)
            self._stop, self._stop_by = stop, now + patience_s
            self._team.relay(stop)

    # --- the end of workers -----------------------------------------------------------------------

    def _pass_confession_on(self) -> None:
        """Report a failed script before its process ends: its links break after that.

        Otherwise the others would be heard first, and the node would be taken for lost.
        """
        loss = self._team.confession()
        is_ending = self._stop is not None or self._signal is not None
        if loss is not None and self._loss is None and not is_ending:
            self._loss = loss
            self._report(loss)
            self._team.reassure()

    def _look_after_workers(self, now: float) -> None:
        loss = self._team.loss(now)
        if loss is not None:
            is_reported = self._loss is not None
            self._loss, said = self._team.last_words(loss)
            for event in said:
                self._uplink.tell(event)
            self._team.kill()
            if self._stop is None and self._signal is None and not is_reported:
                self._report(self._loss)  # large processes take seconds to go
            self._team.end()
            if self._stop is None and self._signal is not None:
                self._leave(self._signal, self._loss.reason)
        if not self._team.is_running:
            reap_children()

    def _leave(self, number: int, reason: str) -> None:
        """End, because of a signal, and say so: nobody then waits for the lease to expire."""
        code = -number if self._loss is None else self._loss.code
        self._part(code, reason, code=128 + number)

    def _part(self, ended: int, reason: str, *, code: int) -> None:
        """End with `code`, and say how the workers ended and why."""
        joined = self._joined
        if self._uplink.ever_known:
            self._uplink.tell(Left(job=joined.job, agent=joined.agent, code=ended, reason=reason))
            self._uplink.flush(self._team.heartbeat(), timeout_s=_FLUSH_S)
        self._exit = Exit(code, reason)

    def _report(self, loss: Loss) -> None:
        logger.warning("lost the workers: %s", loss.reason)
        if self._welcome is not None:
            self._uplink.tell(
                Exited(
                    job=self._joined.job,
                    agent=self._joined.agent,
                    launch=self._welcome.launch,
                    code=loss.code,
                    reason=loss.reason,
                )
            )


def _is_recast(welcome: Welcome, before: Welcome) -> bool:
    """Return whether the same workers are to run the script again."""
    return welcome.launch == before.launch and welcome.cast > before.cast


def shell_code(code: int) -> int:
    """Return an exit status as a shell shows it.

    >>> shell_code(-9), shell_code(3)
    (137, 3)
    """
    return code if code >= 0 else 128 - code
