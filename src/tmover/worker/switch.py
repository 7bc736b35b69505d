"""How a rank gets from one world to the next: the boundary of a planned move, recovery, promotion.

All of it runs in the main thread, at a safe point of the script. One loop serves every case: report
on what was revoked, wait for what the controller decides, do it; if doing it breaks, report again.
No timeout in it decides anything: the only one ends the process when no controller is heard for
`fence_after_s` with a broken world.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from tmover.core.events import Entered, Passed, Plan, PrepareFailed
from tmover.core.orders import Assign, Prepare, Store, Welcome
from tmover.core.rank import Verdict
from tmover.errors import Interrupted, LinkError, StateError
from tmover.worker.handover import Handover, Owner
from tmover.worker.inject import Point
from tmover.worker.lastsave import LastSave
from tmover.worker.runtime import Runtime

logger = logging.getLogger(__name__)


class Switch:
    """The moves of one rank."""

    def __init__(self, runtime: Runtime, owner: Owner) -> None:
        self._runtime = runtime
        self._owner = owner
        self._handover = Handover(runtime, owner)
        self._last = LastSave(runtime, owner)
        self._standing = runtime.standing

    # --- what the session calls -------------------------------------------------------------------

    def planned(self, epoch: int) -> None:
        """Switch to `epoch` at this boundary: every rank has voted for it."""
        runtime = self._runtime
        order = runtime.prepare
        step = self._standing.rank.step
        if order is None or order.plan.epoch != epoch or step is None:
            return None  # aborted since the vote: the world before still stands
        runtime.send(
            Entered(job=runtime.identity.job, worker=runtime.worker, epoch=epoch, step=step)
        )
        self._standing.at_safe_point = True
        try:
            self._handover.send_all(order, step)
            if order.plan.rank_of(runtime.worker) is not None:
                self._cross(order.plan, step)
                return None
        except (LinkError, Interrupted) as error:
            self._broke(epoch, error)
        finally:
            self._standing.at_safe_point = False
        return self._follow(epoch)

    def recover(self) -> None:
        """Go from a revoked world to the one the controller assigns."""
        self._runtime.fabric.quiesce()
        self._follow(0)

    def decision(self, step: int) -> Assign:
        """Return the assignment that settles the doubt about `step`."""
        self._runtime.fabric.quiesce()
        self._standing.at_safe_point = True
        try:
            while True:
                order = self._next_order(0)
                if order is not None:
                    return order
        finally:
            self._standing.at_safe_point = False

    def promotion(self, timeout_s: float = math.inf) -> Welcome | bool:
        """Wait, warm, until this standby is promoted and has passed into the job's world.

        Return whether it was within the time; the order if it is to rehearse another slot instead.
        """
        until = time.monotonic() + timeout_s
        self._standing.at_safe_point = True
        try:
            while self._standing.rank.epoch == 0:
                order = self._await_promotion(until)
                if order is None:
                    return False
                if isinstance(order, Welcome):
                    return order
                try:
                    if isinstance(order, Prepare):
                        self._join_planned(order)
                    else:
                        self._take(order)
                except (LinkError, Interrupted) as error:
                    self._broke(order.plan.epoch, error)
            return True
        except SystemExit:  # it is ended: what the script does with that is nothing of the job's
            self._runtime.isolation.draw()
            raise
        finally:
            self._standing.at_safe_point = False

    def _await_promotion(self, until: float) -> Prepare | Assign | Welcome | None:
        """Return the next order that gives this standby a rank; report meanwhile if asked.

        None if there is none in time.
        """
        runtime, standing = self._runtime, self._standing
        while True:
            standing.report(*standing.rank.revoked)

            def prepare() -> Prepare | None:
                order = runtime.prepare
                over = order is None or order.plan.epoch in standing.rank.revoked
                return None if over else order

            standing.wait(
                lambda: (
                    standing.stop is not None
                    or standing.owes_report()
                    or standing.next_assign(0) is not None
                    or prepare() is not None
                    or standing.next_cast(runtime.cast) is not None
                ),
                timeout_s=min(runtime.config.fence_after_s, max(0.0, until - time.monotonic())),
            )
            standing.raise_if_stopped()
            order = standing.next_assign(0) or prepare() or standing.next_cast(runtime.cast)
            if order is not None:
                return order
            if time.monotonic() >= until:
                return None

    # --- the loop ---------------------------------------------------------------------------------

    def _follow(self, pending: int) -> None:
        """Report and obey until this rank is in a world that holds; `pending` was planned."""
        self._standing.at_safe_point = True
        try:
            while True:
                order = self._next_order(pending)
                if order is None:
                    return  # the planned move was aborted: the world before still stands
                is_member = order.plan.rank_of(self._runtime.worker) is not None
                try:
                    if not is_member:
                        self._help(order)
                        continue  # it has no place any more: the controller will end it
                    self._take(order)
                except (LinkError, Interrupted) as error:
                    self._broke(order.plan.epoch, error)
                    pending = 0
                    continue
                return
        finally:
            self._standing.at_safe_point = False

    def _help(self, order: Assign) -> None:
        """Do what is asked of who has no place in a world.

        A leaver sends the copies it keeps, if nobody else keeps them. All survivors store what they
        hold if there is no world any more.
        """
        if isinstance(order, Store):
            with self._standing.changing():
                self._standing.assign = None
            self._last.write(order)
            return
        if self._runtime.worker not in order.sources.values():
            self._standing.revoke(order.plan.epoch)
            return
        with self._standing.changing():
            self._standing.assign = None
        self._handover.send_copies(order.plan, order.sources, order.step)

    def _next_order(self, pending: int) -> Assign | None:
        """Return the next assignment, or None if `pending` was aborted and the old world stands."""
        runtime, standing = self._runtime, self._standing
        while True:
            runtime.sync()
            revoked = standing.rank.revoked
            standing.report(*(epoch for epoch in revoked if epoch >= standing.rank.epoch))

            def due() -> bool:
                return (
                    standing.stop is not None
                    or standing.owes_report()
                    or standing.next_assign(standing.rank.epoch) is not None
                    or (pending in runtime.aborted and not standing.rank.interrupted)
                    or standing.rank.revoked != revoked  # noqa: B023 - read before the next turn
                )

            if not standing.wait_for_order(due, silent_s=runtime.config.fence_after_s):
                logger.error(
                    "heard of no controller for %g s with a broken world: ending this rank",
                    runtime.config.fence_after_s,
                )
                raise SystemExit(1)
            standing.raise_if_stopped()
            order = standing.next_assign(standing.rank.epoch)
            if order is not None:
                runtime.trace.write("assigned", epoch=order.plan.epoch, step=order.step)
                return order
            if pending in runtime.aborted and not standing.rank.interrupted:
                return None

    def _broke(self, epoch: int, error: LinkError | Interrupted) -> None:
        peers = error.peers if isinstance(error, LinkError) else ()
        logger.warning("the switch to epoch %d broke: %s", epoch, error)
        self._runtime.fabric.revoke(epoch, str(error))
        self._standing.accuse(epoch, peers, str(error))
        self._runtime.trace.write("broke", epoch=epoch, reason=str(error), peers=list(peers))

    # --- doing what was decided -------------------------------------------------------------------

    def _take(self, order: Assign) -> None:
        """Bring this rank to `order.step` and into `order.plan`."""
        runtime, plan = self._runtime, order.plan
        rank = plan.rank_of(runtime.worker)
        assert rank is not None
        self._owner.rebind(rank)
        self._connect(plan, relink=order.relink)
        runtime.trace.write("connected", epoch=plan.epoch)
        if runtime.worker in order.sources:
            self._handover.receive(order)
        elif order.back:
            self._handover.go_back(order.step)
        if order.back:
            self._handover.send_copies(plan, order.sources, order.step)
        else:
            self._handover.send_all(order, order.step)
        self._cross(plan, order.step)
        if order.back:
            runtime.copies.reached = order.step

    def _join_planned(self, order: Prepare) -> None:
        """Prepare beside the training; then take the leaver's state and pass."""
        runtime, plan = self._runtime, order.plan
        rank = plan.rank_of(runtime.worker)
        if rank is None:
            return
        runtime.trace.write("prepare_begin", epoch=plan.epoch)
        try:
            self._owner.rebind(rank)
            runtime.injector.at(Point.IN_PREPARE, None)
            self._connect(plan)
        except (LinkError, StateError) as error:
            runtime.prepare = None
            runtime.send(
                PrepareFailed(
                    job=runtime.identity.job,
                    worker=runtime.worker,
                    epoch=plan.epoch,
                    reason=str(error),
                )
            )
            return
        runtime.trace.write("prepared", epoch=plan.epoch)
        runtime.say_prepared(plan.epoch)
        if self._handover.receive_if_not_aborted(order):
            step = self._standing.rank.step
            assert step is not None
            self._cross(plan, step)

    def _connect(self, plan: Plan, *, relink: Sequence[tuple[str, str]] = ()) -> None:
        """Open the links of `plan`, and take the time."""
        began = time.monotonic()
        self._runtime.prepare_links(plan, relink=relink)
        self._handover.connect_s = time.monotonic() - began

    def _cross(self, plan: Plan, step: int) -> None:
        """Pass the commit barrier of `plan`. Raises `LinkError` or `Interrupted` if it breaks."""
        runtime, standing, epoch = self._runtime, self._standing, plan.epoch
        runtime.injector.at(Point.BEFORE_BARRIER, step)
        if not standing.enter(epoch):
            msg = f"epoch {epoch} was revoked before its barrier"
            raise Interrupted(msg)
        runtime.kept.put(step, runtime.hand_record_on(self._owner.record(), epoch=epoch))
        runtime.fabric.barrier(epoch)
        if standing.leave(plan) is not Verdict.PASSED:
            msg = f"epoch {epoch} was revoked inside its barrier"
            raise Interrupted(msg)
        runtime.fabric.commit(epoch)
        runtime.serve_copies(plan)
        runtime.prepare = None
        runtime.send(
            Passed(job=runtime.identity.job, worker=runtime.worker, epoch=epoch, step=step)
        )
        links = runtime.fabric.links_opened - runtime.links_before
        runtime.trace.write("passed", epoch=epoch, step=step, links=links)
        runtime.injector.at(Point.AFTER_BARRIER, step)
