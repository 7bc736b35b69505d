"""The controller's shell: hear, write down, decide, perform.

One queue in, one writer. Everything that happens becomes an item of the queue; `turn` takes all
that are there, has their events on disk with one flush, and then handles them one by one, in order.
It is not async: whatever takes time becomes a task, and what comes of it returns through the queue.
"""

from __future__ import annotations

import asyncio
import logging
import pathlib
import time
from collections.abc import Container, Iterable
from typing import Union

import msgspec
from typing_extensions import assert_never

from tmover import wire
from tmover.config import Config, slurm_job
from tmover.controller import keys, limits, lines, requests
from tmover.controller.admission import Admission
from tmover.controller.desk import Desk
from tmover.controller.errands import Errands
from tmover.controller.gate import Gate
from tmover.controller.intake import Intake
from tmover.controller.journal import Entry, Settled
from tmover.controller.lending import Lending, order_after
from tmover.controller.presence import Presence, Who, speaker
from tmover.controller.rights import Rights
from tmover.controller.status import Views
from tmover.controller.suspects import Suspects
from tmover.controller.timers import Timers
from tmover.controller.vigil import Vigil
from tmover.controller.watch import AllocationWatch, Watch
from tmover.controller.work import Item, Said, Work
from tmover.core.events import (
    AnyEvent,
    DeadlinePassed,
    Event,
    Exited,
    Joined,
    LeaseExpired,
    Left,
    Record,
    Submitted,
)
from tmover.core.job import resume, wake
from tmover.core.orders import (
    Action,
    AnyOrder,
    ArmDeadline,
    EndJob,
    EndNode,
    Lend,
    Note,
    Order,
    OrderNode,
    ReassignNode,
    ReleaseNode,
    Stop,
)
from tmover.core.phase import Stage
from tmover.errors import ConfigError, Refused, SchedulerError
from tmover.scheduler.interface import Allocations, Scheduler

logger = logging.getLogger(__name__)

_WRITE_AGAIN_S = 1.0


class Controller:
    """Owns the desk. `turn` is the only place where something is decided."""

    def __init__(
        self,
        config: Config,
        state: pathlib.Path,
        *,
        boot: str,
        desk: Desk,
        gate: Gate,
        scheduler: Scheduler,
        allocations: Allocations | None = None,
    ) -> None:
        self._config = config
        self._state = state
        self._boot = boot
        self._desk = desk
        self._gate = gate
        self._presence = Presence(config.controller.lease_s)
        self._allocations = allocations
        self._intake = Intake(state, desk, allocations)
        poll_s = config.controller.poll_s
        self._suspects = Suspects(config.controller, self._presence)
        self._rights = Rights(config.controller, desk.ledgers)
        self._views = Views(
            desk, self._presence, self._suspects, self._rights, config.deadlines.node_s
        )
        self._watch = Watch(
            scheduler, poll_s=poll_s, agents_on=self._views.local_agents, post=self.post
        )
        self._allocated = None if allocations is None else self._watch_allocations(allocations)
        self._lending = Lending(desk, self.post)
        self._errands = Errands(
            scheduler,
            allocations=allocations,
            borrow=self._lending.borrow,
            again_s=poll_s,
            post=self.post,
            is_there=lambda who: self._presence.seen(who) is not None,
        )
        self._views.troubles = self._errands.troubles
        self._admission = Admission(gate, self._rights, self._intake, boot=boot, post=self.post)
        self._vigil = Vigil(
            config.controller.lease_s,
            desk=desk,
            presence=self._presence,
            suspects=self._suspects,
            lending=self._lending,
            is_behind=lambda: gate.is_behind,
            post=self.post,
        )
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._timers = Timers(config.deadlines, self.post)
        self._last_at = 0.0

    def _watch_allocations(self, allocations: Allocations) -> AllocationWatch:
        watch = AllocationWatch(
            allocations,
            poll_s=self._config.controller.poll_s,
            live=self._desk.looked_after,
            agents_on=self._presence.on_node,
            post=self.post,
            requeued=self._intake.requeued,
            is_ordering=self._desk.is_ordering,
        )
        self._views.allocation = watch.seen
        self._views.scheduler = allocations.load
        return watch

    def post(self, item: Item) -> None:
        """Have `item` handled in its turn."""
        self._queue.put_nowait(item)

    async def run(self) -> None:
        """Go on where the journal ends; work until cancelled, or until something cannot go on."""
        self._take_up()
        parts = [self._handle(), self._admission.run(), self._vigil.run(), self._watch.run()]
        if self._allocated is not None:
            parts.append(self._allocated.run())
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._errands.close()

    # --- what runs beside each other --------------------------------------------------------------

    def _take_up(self) -> None:
        """Begin anew what the controller before this one had under way."""
        now = asyncio.get_running_loop().time()
        for name, ledger in self._desk.ledgers.items():
            self._errands.pursue(ledger)
            for effect in ledger.effects:
                if isinstance(effect, ReleaseNode):  # it may not even have been told to stop
                    who = Who(name, effect.agent)
                    self._presence.join(who, effect.node, None, now)
                    self._presence.release(who)
            if ledger.job.phase.stage is Stage.ENDED:
                continue
            for agent in ledger.job.agents.values():
                self._presence.join(Who(name, agent.name), agent.node, None, now)
            for action in wake(ledger.job):
                if isinstance(action, ArmDeadline):  # the rest is among the ledger's effects
                    self._timers.arm(action, extra_s=self._config.controller.lease_s)

    async def _handle(self) -> None:
        while True:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            self.turn(items)
            if self._queue.empty():
                self._desk.tidy()

    # --- one turn ---------------------------------------------------------------------------------

    def turn(self, items: Iterable[Item]) -> None:
        """Write down, then handle each in order."""
        works = [self._read(item) for item in items]
        failed = self._desk.write([work.entry for work in works if work.entry is not None])
        for work in works:
            self._carry_out(work, failed)

    def _read(self, item: Item) -> Work:
        """Return the item with what the journal is to hold of it, or with why it is refused."""
        try:
            entry = self._entry(item)
            return Work(item, entry if entry is None else lines.check(entry))
        except (Refused, ConfigError, SchedulerError) as error:
            return Work(item, refusal=str(error))
        except Exception:  # one message's trouble is not the others'
            logger.exception("could not read %s", item)
            return Work(item, refusal=requests.INTERNAL_ERROR)

    def _entry(self, item: Item) -> Entry | None:
        """Return what the journal is to hold of `item`. Raises `Refused` or `ConfigError`."""
        if isinstance(item, Submitted):
            return None if item.job in self._desk.ledgers else self._stamp(item)
        if not isinstance(item, Said):
            job = self._desk.ledgers[item.job].job
            is_late = job.phase.stage is Stage.ENDED and not isinstance(item, Settled)
            return None if is_late else self._stamp(item)
        message = item.message
        self._rights.check(item.user, message)
        if not isinstance(message, wire.Heartbeat):
            logger.debug("heard %s", message)
        if isinstance(message, Event):
            return self._entry_of(limits.bounded(message))
        if isinstance(message, wire.SubmitRequest):
            event = self._intake.submitted(message)
            return None if isinstance(event, str) else self._stamp(event)
        if isinstance(message, (wire.MoveRequest, wire.ReadyRequest, wire.CancelRequest)):
            name = self._rights.meant(item.user, message.job)
            return self._stamp(requests.event(self._views.of(name), message))
        return None

    def _entry_of(self, event: AnyEvent) -> Entry | None:
        """Return what the journal is to hold of what an agent has said."""
        ledger = self._desk.ledgers.get(event.job)
        if ledger is None:
            raise Refused(requests.unknown(event.job))
        if isinstance(event, Joined):
            keys.read_secret(self._state, event.job)  # without it nobody can be greeted
            if ledger.job.has_met(event.agent):
                return None  # it is told again what it may have missed: nothing is decided
        return self._stamp(event)

    def _carry_out(self, work: Work, failed: Container[str]) -> None:
        try:
            if work.entry is not None and work.entry.job in failed:
                self._put_off(work)
            elif isinstance(work.item, Said):
                self._answer(work, work.item)
            elif work.entry is not None:
                self._decide(work.entry)
        except Exception:  # one message's trouble is not the others'
            logger.exception("could not handle %s", work.item)

    def _answer(self, work: Work, said: Said) -> None:
        """Handle what was said."""
        route, message = said.route, said.message
        if work.refusal:
            self._admission.note(said, work.refusal)
            job = message.job if isinstance(message, Record) else None
            is_unknown = job is not None and work.refusal == requests.unknown(job)
            self._gate.send(route, wire.RefusedReply(text=work.refusal, is_unknown=is_unknown))
        elif isinstance(message, wire.Heartbeat):
            self._heartbeat(route, message)
        elif isinstance(message, wire.Program):
            self._lending.hear(message)
        elif isinstance(message, wire.StatusRequest):
            self._gate.send(route, self._views.reply(message, said.user))
        elif isinstance(message, Joined):
            self._join(route, message, work.entry)
        elif isinstance(message, wire.SubmitRequest) and message.slurm and work.entry is None:
            name = slurm_job(message.slurm.id)
            self._gate.send(route, wire.Accepted(text=f"job {name} is known here", job=name))
        elif work.entry is not None:
            actions = self._decide(work.entry)
            if isinstance(message, wire.Request):
                self._gate.send(route, requests.answer(work.entry, actions))
            else:
                self._heard(route, speaker(message))

    def _heartbeat(self, route: bytes, message: wire.Heartbeat) -> None:
        who = Who(message.job, message.agent)
        if message.job not in self._desk.ledgers:
            text = requests.unknown(message.job)
            self._gate.send(route, wire.RefusedReply(text=text, is_unknown=True))
        elif self._heard(route, who):
            self._presence.beat(who, limits.sound(message))
            heard = wire.Heard(job=who.job, agent=who.agent, boot=self._boot)
            self._gate.send(route, heard)

    def _heard(self, route: bytes, who: Who) -> bool:
        """Renew the agent's lease; ask who it is unless it has joined over this connection."""
        now = asyncio.get_running_loop().time()
        if self._presence.hear(who, route, now):
            return True
        if self._presence.must_ask(who, now):
            ask = wire.WhoAreYou(job=who.job, agent=who.agent, boot=self._boot)
            self._gate.send(route, ask)
        return False

    def _join(self, route: bytes, message: Joined, entry: Entry | None) -> None:
        """Greet the agent, then tell it all that it may have missed."""
        who = Who(message.job, message.agent)
        secret = keys.read_secret(self._state, message.job)
        self._presence.join(who, message.node, route, asyncio.get_running_loop().time())
        self._gate.send(route, self._lending.greeting(message, self._boot, secret))
        told = (self._decide(entry) or []) if entry is not None else []
        for order in resume(self._desk.ledgers[who.job].job, who.agent):
            if order not in told:
                self._order(order)

    def _put_off(self, work: Work) -> None:
        """Try again later: the journal could not be written."""
        loop = asyncio.get_running_loop()
        if isinstance(work.item, Said) and isinstance(work.item.message, wire.Request):
            text = "the journal cannot be written, see the controller's log"
            self._gate.send(work.item.route, wire.RefusedReply(text=text))
        else:
            loop.call_later(_WRITE_AGAIN_S, self.post, work.item)

    # --- deciding and performing ------------------------------------------------------------------

    def _decide(self, entry: Entry) -> list[Action] | None:
        """Take the entry in and do what follows; return that, None if it could not be taken in."""
        ledger = self._desk.ledgers.get(entry.job)
        before = None if ledger is None else ledger.job.phase.stage
        actions = self._desk.take_in(entry)
        ledger = self._desk.ledgers.get(entry.job)
        if ledger is None:
            return []
        if isinstance(entry, DeadlinePassed):
            self._timers.fired(entry)
            if actions:
                extra = {"job_id": entry.job, "epoch": entry.epoch}
                wait_s = self._timers.wait_s(entry.wait)
                logger.info("%s_s (%s s) passed", entry.wait.value, wait_s, extra=extra)
        is_end = isinstance(entry, (Left, Exited, LeaseExpired))
        if is_end and ledger.job.allocated and self._allocations is not None:
            self._allocations.nudge()
        stage = ledger.job.phase.stage
        if stage is not before:
            was = "nothing" if before is None else before.value
            extra = {"job_id": entry.job, "epoch": ledger.job.epoch}
            logger.info("job %s went from %s to %s", entry.job, was, stage.value, extra=extra)
        for action in [*(actions or ()), *order_after(entry)]:
            self._perform(action)
        if isinstance(entry, Settled):
            self._errands.settled(entry.effect)
        self._errands.pursue(ledger)
        return actions

    def _perform(self, action: Action) -> None:
        match action:
            case Order():
                self._order(action)
            case ArmDeadline():
                self._timers.arm(action)
            case Note():
                logger.info("job %s: %s", action.job, action.text, extra={"job_id": action.job})
            case EndNode() | OrderNode() | ReleaseNode() | ReassignNode() | EndJob():
                pass  # the desk has it among the ledger's effects, for `Errands`
            case _:
                assert_never(action)

    def _order(self, order: AnyOrder) -> None:
        """Send, if the agent is there. If not, `resume` has it when the agent joins again."""
        who = Who(order.job, order.agent)
        seen = self._presence.seen(who)
        if isinstance(order, (Stop, Lend)):
            self._presence.release(who)
        if seen is None or seen.route is None:
            return
        logger.debug("sent %s", order)
        if not self._gate.send(seen.route, order):
            self._presence.drop_route(who)

    def _stamp(self, item: Union[AnyEvent, Settled]) -> Entry:
        """Return the entry with the time. The clock may be set back; the journal's never is."""
        self._last_at = max(self._last_at, time.time())
        return msgspec.structs.replace(item, at=self._last_at)
