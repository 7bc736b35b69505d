"""A rehearsal, step by step: shadow steps, the trial of the proof, and the wait for a slot.

It ends in one of three ways: this standby is promoted, the script is run again as another rank
(`stage`), or, in a rank that starts from a checkpoint, that is loaded.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from typing import Protocol

from tmover.core.events import Warm
from tmover.errors import StateError, TmoverError
from tmover.state.capture import Tracked
from tmover.state.generations import Copying, Generation
from tmover.state.loader import Batches
from tmover.state.records import Record
from tmover.worker import proof, variables
from tmover.worker.answers import Answers
from tmover.worker.runtime import Runtime
from tmover.worker.session import Engine, Step
from tmover.worker.switch import Switch
from tmover.worker.warmth import look

logger = logging.getLogger(__name__)


class Performed(Engine, Protocol):
    """What a rehearsal asks of the engine."""

    tracked: Tracked

    def schema(self) -> dict[str, str]:
        """Return what a standby must have in common with the rank it takes over, by name."""

    def rebind(self, rank: int) -> None:
        """Hold `rank` from now on."""

    def adopt(self, record: bytes) -> None:
        """Go on where the owner of `record` stood."""


class Rehearsal:
    """One performance of the script in which nothing counts."""

    def __init__(
        self, runtime: Runtime, engine: Performed, switch: Switch, answers: Answers
    ) -> None:
        self._answers = answers
        self._runtime = runtime
        self._engine = engine
        self._switch = switch
        self._done = 0
        self._trial: proof.Trial | None = None
        """What is tried in the step that was handed out."""
        self._variables: variables.Facts = {}
        """What the script could read when it entered the loop."""
        self._before: Generation | None = None
        """What it held before the step that it does once more."""
        self._watchdog: threading.Timer | None = None
        self._began = self._step_s = 0.0
        self._proofs = 0
        """How many steps it has done once more."""
        self._proof: str | None = None
        """What came of the proof, to be said with the next word."""

    @property
    def is_over(self) -> bool:
        """Whether as many steps have been rehearsed as are to be."""
        return self._done >= self._runtime.config.rehearse_steps

    def shadow_step(self, batches: Batches) -> Step:
        """Return the next of the first steps."""
        self._end_if_stopped()
        if not self._done and self._runtime.identity.sandbox:
            self._variables = variables.still_read(sys._getframe())
        self._began = time.monotonic()
        return Step(self._engine, self._done, batches.next())

    def rest(self, batches: Batches) -> Step | None:
        """Wait for a slot; None once this standby has taken it. A step is to be tried first."""
        self._end_if_stopped()
        if (tried := self._end_trial()) is not None and tried.order is not None:
            self._runtime.stage.leave(tried.order, tried)
        if (step := self._try_afresh(batches)) is not None:
            return step
        self._put_back()
        runtime = self._runtime
        runtime.isolation.rest()
        self._say_warm()
        order = self._switch.promotion(runtime.config.prove_every_s or math.inf)
        if order is False:
            return self._prove_again(batches)
        if order is True:
            self._answers.end()
            runtime.become(runtime.identity.live())
            runtime.pulse(runtime.standing.rank.step or 0)
            return None
        if not order.prove:
            runtime.stage.leave(order, None)
        try:
            self._engine.rebind(order.slot * order.nproc + runtime.identity.local_rank)
            self._trial = proof.in_place(
                self._engine.tracked, position=batches.position(), index=self._done, order=order
            )
            return self._hand_out(self._trial, batches)
        except TmoverError as error:
            runtime.stage.leave(order, proof.obstructed(error, order))

    def update(self) -> None:
        """Be told that the first update of a step comes now."""
        if self._trial is not None:
            self._trial.see_gradients(self._engine.tracked)

    def close(self, error: BaseException | None, batches: Batches | None) -> bool:
        """End a step; return whether `error` is absorbed."""
        self._done += 1
        self._step_s = time.monotonic() - self._began
        self._runtime.fabric.witness = None
        trial = self._trial
        if trial is not None:
            trial.see_end(self._engine.tracked, None if batches is None else batches.position())
            if error is not None:
                trial.facts["error"] = repr(error)
            return True
        if self._before is not None and error is not None:
            self._runtime.isolation.draw()
            return False  # it could do this step before: whatever has changed, it is not warm
        if error is not None:
            if self._done == self._runtime.config.rehearse_steps:
                self._runtime.isolation.draw()
                return False  # not one step could be rehearsed to its end: let the user see why
            logger.warning("rehearsal of step %d: %s", self._done - 1, error)
        return True

    def _end_if_stopped(self) -> None:
        """Raise `SystemExit` if this process's part in the job is over; see `Isolation.draw`."""
        if self._runtime.standing.stop is not None:
            self._runtime.isolation.draw()
            self._runtime.standing.raise_if_stopped()

    # --- at rest ----------------------------------------------------------------------------------

    def _prove_again(self, batches: Batches) -> Step:
        """Return one more step, to show that it still can; what it changes is put back."""
        record = Record.capture(self._engine.tracked, position=batches.position()).encode()
        before = Copying(self._engine.tracked, step=self._done, record=record).finish()
        self._before = before
        self._watchdog = threading.Timer(self._runtime.config.prove_s, self._give_up)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._began = time.monotonic()
        return Step(self._engine, self._done, batches.next())

    def _give_up(self) -> None:
        limit_s = self._runtime.config.prove_s
        self._runtime.die(f"the standby did not end another shadow step within {limit_s:g} s")

    def _put_back(self) -> None:
        """Be as before the step that was done once more, if there was one."""
        before, self._before = self._before, None
        if before is None:
            return
        assert self._watchdog is not None
        self._watchdog.cancel()
        before.restore(self._engine.tracked)
        self._engine.adopt(before.record)
        Record.decode(before.record).restore_rng()
        self._proofs += 1

    # --- the proof --------------------------------------------------------------------------------

    def _try_afresh(self, batches: Batches) -> Step | None:
        """Return the step that was tried in place, if there was one, to be done again here."""
        before = self._runtime.stage.trial
        if before is None:
            return None
        if before.generation is None:
            self._runtime.stage.trial, self._proof = None, before.obstacle
            return None
        self._trial = before.afresh()
        try:
            before.generation.restore(self._engine.tracked)
            self._engine.adopt(before.generation.record)
            return self._hand_out(self._trial, batches)
        except StateError as error:
            self._trial = self._runtime.stage.trial = None
            self._proof = f"its state in place does not fit the rank that it is to be: {error}"
            return None

    def _hand_out(self, trial: proof.Trial, batches: Batches) -> Step:
        self._began = time.monotonic()
        step = Step(self._engine, trial.index, batches.next())
        self._runtime.fabric.witness = trial.witness
        trial.begin(step.batch)
        return step

    def _end_trial(self) -> proof.Trial | None:
        """Return the trial that the last step was, after comparing it if it is the second."""
        trial, self._trial = self._trial, None
        if trial is None:
            return None
        trial.see_variables(self._variables)
        before, stage = self._runtime.stage.trial, self._runtime.stage
        if trial.order is None and before is not None:
            self._proof, stage.trial = trial.compare(before), None
            if self._proof:
                logger.warning("this script is run again for each rank it takes: %s", self._proof)
        return trial

    def _say_warm(self) -> None:
        """Tell the controller that this standby can take over what has this schema."""
        runtime, said = self._runtime, self._proof
        self._proof = None
        runtime.trace.write("warm", cast=runtime.cast, proof=said)
        runtime.send(
            Warm(
                job=runtime.identity.job,
                worker=runtime.worker,
                launch=runtime.launch,
                schema=self._engine.schema(),
                cast=runtime.cast,
                proof=said,
                warmth=look(
                    self._engine.tracked,
                    step_s=self._step_s,
                    proofs=self._proofs,
                    links=runtime.fabric.wiring.live,
                ),
                recorded=self._answers.recorded(),
            )
        )
