"""The engine of a rank under `tmover run`: attempts, votes, redo, and the boundary."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tmover.comm import intercept
from tmover.core.events import Looping, Placing
from tmover.core.rank import Saving
from tmover.errors import ConfigError, Interrupted
from tmover.state.capture import Tracked
from tmover.state.loader import Batches
from tmover.state.records import Record
from tmover.state.snapshot import Snapshot
from tmover.worker import refusals, signals
from tmover.worker.answers import Answers
from tmover.worker.attempt import Attempt, Phase, inject_in_body
from tmover.worker.ballot import Ballot
from tmover.worker.checkpoints import Checkpoints
from tmover.worker.inject import Point
from tmover.worker.rehearsal import Rehearsal
from tmover.worker.resuming import Resuming
from tmover.worker.runtime import Runtime
from tmover.worker.scaling import vote_where_skipped
from tmover.worker.session import Step
from tmover.worker.switch import Switch

logger = logging.getLogger(__name__)


class LiveEngine:
    """Carries out the steps of a rank of a job, or of a standby that rehearses to become one."""

    def __init__(self, runtime: Runtime, *, seed: int) -> None:
        self._runtime = runtime
        self._seed = seed
        self.tracked = Tracked()
        self.checkpoints = Checkpoints(lambda step: runtime.trace.write("stored", step=step))
        self._resuming = Resuming(runtime, self.checkpoints)
        self._switch = Switch(runtime, self)
        self._asked = signals.listen()
        self._ballot = Ballot(runtime, self.tracked, self._switch, self._asked)
        self._attempt: Attempt | None = None
        self._last: Attempt | None = None  # closed last, until its boundary is dealt with
        self._pending: Step | None = None  # handed out and not committed
        self._record = b""
        """This rank's private records as of its last committed step; step k+1 opens with them."""
        self._batches: Batches | None = None
        self._groups = ""  # a digest of those that the script had made when it opened the loop
        self._undo = False  # whether a step is voted on at its end, its updates included
        self._total = 0
        self._answers = Answers(runtime)
        self._rehearsal = Rehearsal(runtime, self, self._switch, self._answers)
        self._finals: set[int] = set()  # parts after the loop of which one was handed out
        self._updates = refusals.Updates(self.tracked)
        self._echo = False  # whether the attempt is of a part that all others have done already
        runtime.recover = self._switch.recover
        runtime.form()
        if not dist.is_initialized():
            dist.init_process_group("tmover")
        self._hook = register_optimizer_step_pre_hook(self._before_update)
        self._vote_no_more = vote_where_skipped(self._before_update)

    def dismiss(self) -> None:
        """Let go of torch and of the loader: the script is to be run again."""
        self._hook.remove()
        self._vote_no_more()
        if self._batches is not None:
            self._batches.close()

    # --- who --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._runtime.identity.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._runtime.identity.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this node."""
        return self._runtime.identity.local_rank

    @property
    def sandbox(self) -> bool:
        """Whether this is a rehearsal: of a standby, or before a checkpoint is loaded."""
        return self._runtime.identity.sandbox or self._resuming.pending

    # --- the loop ---------------------------------------------------------------------------------

    def begin(self, loader: Any, total: int | None, *, undo: bool) -> int:
        """Open the loop."""
        self._undo = undo
        self._batches = Batches(loader, seed=self._seed, rank=self.rank)
        self._groups = intercept.shape()
        self.tracked.refuse_hooks_with_state()
        self._batches.require_movable(slots=self._runtime.identity.nnodes)
        self._batches.mistrust()
        self._total = self._batches.length() if total is None else total
        if self._total < 1:
            msg = f"session.steps(total={self._total}): a job has at least one step"
            raise ConfigError(msg)
        runtime = self._runtime
        self._ballot.role = self._answers.begin(self.schema(), self._total)
        if not self.sandbox:
            placing = self._batches.placing
            if placing is Placing.REPLAY and self.rank == 0:
                logger.warning(refusals.REPLAYED)
            self._resuming.choose(self._total)
            runtime.send(
                Looping(
                    job=runtime.identity.job,
                    worker=runtime.worker,
                    launch=runtime.launch,
                    schema=self.schema(),
                    placing=placing,
                    step=self._resuming.step,
                )
            )
        runtime.isolation.looping()
        runtime.fabric.refusal = refusals.OUTSIDE_OF_STEP
        return self._total

    def schema(self) -> dict[str, str]:
        """Return what a standby must have in common with the rank it takes over, by name."""
        named = {"session.role": self.tracked.role} if self.tracked.role else {}
        return {**self.tracked.schema(), "process groups": self._groups, **named}

    def leave(self) -> None:
        """Leave the loop, at its end or before."""
        self._runtime.fabric.refusal, self._runtime.fabric.caution = "", refusals.AFTER_LOOP

    def break_off(self) -> None:
        """End the process if the script leaves the loop early where it must not go on."""
        if self.sandbox:
            self._runtime.die(refusals.LEFT_IN_REHEARSAL)
        if self._last is not None and self._last.phase is not Phase.PASSED:
            self._runtime.die(refusals.LEFT_UNCOMMITTED)

    def next_step(self) -> Step | None:
        """Settle the boundary after the last step and return the next one; None at the end."""
        runtime = self._runtime
        runtime.stage.check()
        if self.sandbox:
            if (shadow := self._rehearse()) is not None:
                return shadow
        else:
            runtime.injector.at(Point.AFTER_BODY, self._last.step.index if self._last else None)
            self._settle()
        step = self._stand(self._total - 1)
        seat = self._resuming.seat()
        self.checkpoints.boundary(self.tracked, step=step, record=self._record, seat=seat)
        if step >= self._total - 1:
            self._end(step)
            return None
        if runtime.copies.is_due(step):
            runtime.copies.take(self.tracked, step=step, record=self._record)
        return self._hand_out(step + 1)

    def final_step(self, index: int) -> Step | None:
        """Return an attempt of a collective part after the loop, as step `total + index`.

        A joiner that comes when all others have done it runs it once, answered locally, so that the
        names it sets exist; `committed` stays false.
        """
        self._runtime.stage.check()
        self._settle()
        wanted = self._total + index
        step = self._stand(wanted)
        if wanted in self._finals:
            return None if step >= wanted else Step(self, wanted, None)
        self._finals.add(wanted)
        self._echo = step >= wanted
        return Step(self, wanted, None)

    def _stand(self, last: int) -> int:
        """Return the step this rank stands at; if it is `last` or later, it stays there."""
        standing = self._runtime.standing
        while True:
            step = standing.rank.step
            assert step is not None
            if step < last or self._ballot.secure(step, self._record):
                return step
            self._settle()

    def _settle(self) -> None:
        """Do at the boundary what the last vote or a revocation asks for."""
        last, self._last = self._last, None
        runtime = self._runtime
        runtime.standing.raise_if_stopped()
        if last is not None and last.switch_to and not runtime.sync():
            self._switch.planned(last.switch_to)
        while runtime.sync():
            self._switch.recover()

    def _hand_out(self, index: int) -> Step:
        assert self._batches is not None
        self._runtime.pace.begin()
        if self._pending is not None and self._pending.index == index:
            self._pending.batch = self._batches.again()
            self._runtime.trace.write("redo", step=index)
            return self._pending
        batch = self._batches.next()
        self._pending = Step(self, index, batch)
        return self._pending

    def _end(self, step: int) -> None:
        rank = self._runtime.standing.rank
        if rank.asked or rank.saving is Saving.NEXT or self._asked.take():
            logger.warning("a checkpoint was asked for in the last steps: the loop ends without")
        self.checkpoints.finish(rank.epoch, is_over=self._runtime.sync)
        self._runtime.trace.finished(step, self.tracked, self._record)

    # --- an attempt -------------------------------------------------------------------------------

    def open(self, step: Step) -> None:
        """Begin an attempt: from the records of the last vote, with a way back."""
        runtime = self._runtime
        if self._attempt is not None:
            msg = f"`with step` inside `with step` (step {self._attempt.step.index})"
            raise ConfigError(msg)
        if not self.sandbox:
            if self._record:
                opening, ward = Record.decode(self._record), runtime.kept.get(step.index - 1)
                facts = {"index": step.index, "first": runtime.standing.rank.first}
                if not runtime.late:
                    runtime.late = refusals.has_late(opening, ward, self.tracked, **facts)
                opening.restore_rng()
            runtime.trace.write("attempt", step=step.index, samples=self._samples(step.index))
        snapshot = Snapshot(self.tracked, whole=self._undo and not self.sandbox)
        if not self.sandbox:
            refusals.check_opening(self.tracked, snapshot)
        self._attempt = Attempt(step=step, snapshot=snapshot)
        runtime.fabric.attempt_open = True
        runtime.fabric.refusal = runtime.fabric.caution = ""
        if self._echo or self._resuming.pending:
            self._resuming.let_alone()
        self._answers.open(step.index)
        if runtime.injector and not self._resuming.pending:
            inject_in_body(runtime.injector, self.tracked, step.index)

    def close(self, step: Step, error: BaseException | None) -> bool:
        """End an attempt: committed, lost, or the user's own error."""
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        runtime = self._runtime
        try:
            if error is not None and not isinstance(error, Exception):
                runtime.isolation.draw()  # if this is a rehearsal
                return False
            if self.sandbox:
                runtime.fabric.quiesce()
                if self._resuming.pending:
                    self._resuming.let_back()
                return self._rehearsal.close(error, self._batches)
            if self._echo:
                return self._close_echo(attempt)
            if attempt.phase is Phase.OPEN:
                if error is not None and not self._excused(error):
                    return False
                if error is None:
                    self._try_vote(attempt)
            elif error is not None:
                return False
            runtime.fabric.quiesce()
        finally:
            runtime.fabric.attempt_open = False
            refusals.guard_boundary(runtime.fabric, step.index, total=self._total)
        self._last = attempt
        if attempt.phase is Phase.PASSED:
            self._commit(attempt)
        else:
            attempt.snapshot.restore(self.tracked)
        return error is not None

    def _close_echo(self, attempt: Attempt) -> bool:
        """End the local run of a part that all others have done."""
        self._echo = False
        self._runtime.fabric.quiesce()
        self._resuming.let_back()
        attempt.snapshot.restore(self.tracked)
        return False

    def _excused(self, error: Exception) -> bool:
        """Return whether `error` is owed to the interruption: the attempt is done again anyway."""
        return self._runtime.sync() or isinstance(error, Interrupted)

    def _try_vote(self, attempt: Attempt) -> None:
        try:
            self._vote(attempt)
        except Interrupted as error:
            logger.info("step %d will be done again: %s", attempt.step.index, error)

    def _commit(self, attempt: Attempt) -> None:
        runtime, index = self._runtime, attempt.step.index
        attempt.step.committed = True
        attempt.step.durable = runtime.copies.durable if runtime.copies.active else index
        if runtime.standing.rank.saving is Saving.NOW:
            attempt.step.checkpoint_requested = True
            self.checkpoints.ask(index)
            self._asked.answered()
            runtime.trace.write("checkpoint", step=index)
        self._record, self.tracked.newer = attempt.record, frozenset()
        self._pending = None
        self._answers.committed(index, self._ballot.roles)
        runtime.trace.write("committed", step=index, samples=self._samples(index))
        runtime.trace.state(index, self.tracked, attempt.record, batch=attempt.step.batch)
        runtime.pulse(index)
        runtime.injector.at(Point.AFTER_UPDATE, index)

    def _samples(self, index: int) -> list[Any] | None:
        """Return the samples of the step that was handed out, for the trace."""
        if self._batches is None or index >= self._total or not self._runtime.trace.enabled:
            return None
        return self._batches.samples()

    # --- the vote ---------------------------------------------------------------------------------

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Vote before the first optimizer step of an attempt (a global step pre-hook)."""
        attempt = self._attempt
        if attempt is None:
            if self._total and self.tracked.holds(optimizer):
                msg = "optimizer.step() outside of `with step:` would not be applied by all or none"
                raise ConfigError(msg)
            return
        self._updates.check(optimizer, args, kwargs, undo=self._undo)
        self._rehearsal.update()
        if not self.sandbox and attempt.phase is Phase.OPEN and not self._undo:
            self._vote(attempt)
        if not self._undo:
            self._runtime.fabric.refusal = refusals.AFTER_UPDATE
        if self.sandbox:
            return
        self._runtime.copies.hold_still()
        self.checkpoints.hold_still()
        attempt.snapshot.hold_still()
        self._runtime.injector.at(Point.BEFORE_UPDATE, attempt.step.index)

    def _vote(self, attempt: Attempt) -> None:
        """Return if this attempt's update is to be applied; raise `Interrupted` if it is not."""
        runtime, step = self._runtime, attempt.step.index
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has none here
            torch.cuda.synchronize()  # what is still computing is not voted on
        attempt.snapshot.refuse_updates(self.tracked)
        runtime.injector.at(Point.BEFORE_VOTE, step)
        position = self._batches.position() if self._batches is not None else None
        attempt.record = Record.capture(self.tracked, position=position).encode()
        self._ballot.decide(attempt, is_last=step >= self._total - 1)

    # --- rehearsal and promotion ------------------------------------------------------------------

    def _rehearse(self) -> Step | None:
        """Return the next step of the rehearsal; None once this rank goes on for real."""
        assert self._batches is not None
        if not self._rehearsal.is_over:
            return self._rehearsal.shadow_step(self._batches)
        if self._resuming.pending:
            self._settle()
            self.adopt(self._resuming.load(self.tracked, self._batches, seed=self._seed))
            return None
        return self._rehearsal.rest(self._batches)

    # --- what a switch asks of the session --------------------------------------------------------

    def rebind(self, rank: int) -> None:
        """Hold `rank` from now on: environment, process groups, sampler."""
        if rank == self.rank:
            return
        intercept.rebind(rank)
        self._runtime.become(self._runtime.identity.at_rank(rank))
        self.tracked.refuse_misplaced()
        if self._batches is not None:
            self._batches.rebind(rank)

    def record(self) -> bytes:
        """Return this rank's own records as of the step it stands at."""
        return self._record

    def adopt(self, record: bytes) -> None:
        """Go on where the owner of `record` stood."""
        decoded = Record.decode(record)
        decoded.restore_private(self.tracked)
        if self._batches is not None and decoded.position is not None:
            self._batches.seek(decoded.position)
        self._record = record
        self._pending = None
