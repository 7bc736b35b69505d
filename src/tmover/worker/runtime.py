"""A worker's parts, put together, and what each order from the controller does to them.

Orders arrive in the control thread. What can be done at once is done there (revoke, arm, open links
beside the training); what must happen at a safe point of the script (hand state over, pass a
barrier) is left in `Standing` for the main thread, which finds it at the next vote or boundary.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from tmover import config, wire
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.frame import Kind
from tmover.comm.siblings import Siblings
from tmover.core import copies, replicas
from tmover.core import rank as rules
from tmover.core.events import (
    NO_STEP,
    Finished,
    FromAgent,
    Plan,
    Prepared,
    PrepareFailed,
    Sharing,
)
from tmover.core.orders import Abort, Arm, Assign, Done, Prepare, Revoke, Start, Stop, Welcome
from tmover.environment import WorkerEnvironment
from tmover.errors import ConfigError, Interrupted, LinkError, TmoverError
from tmover.worker import refusals
from tmover.worker.copies import Copies
from tmover.worker.identity import Identity
from tmover.worker.inject import Injector, Point
from tmover.worker.isolation import Isolation
from tmover.worker.pace import Pace
from tmover.worker.stage import Stage
from tmover.worker.standing import Standing
from tmover.worker.trace import Trace
from tmover.worker.vote import Holding, Kept

if TYPE_CHECKING:
    from tmover.worker.control import Control

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
FORM_TIMEOUT_S = 300.0
FINISHED_AGAIN_S = 10.0
"""How often a rank that waits for the others says again that it has finished."""


class Runtime:
    """Everything a worker is besides the user's script."""

    def __init__(
        self,
        identity: Identity,
        *,
        control: Control,
        fabric: Fabric,
        launch: int,
        environment: WorkerEnvironment,
    ) -> None:
        self.config = config.load().worker
        self.identity = identity
        self.launch, self.cast = launch, 0
        self.control = control
        self.fabric = fabric
        self.trace = Trace(environment.trace, identity, states=environment.trace_state)
        self.isolation = Isolation(self.config, identity, fabric, ours=environment.trace)
        self.injector = Injector(
            environment.inject,
            lambda: self.identity,
            agent_pid=environment.agent_pid,
            cut=fabric.wiring.sever,
            tell=lambda fault: self.trace.write("fault", **fault),
        )
        self.standing = Standing(
            job=identity.job,
            worker=identity.worker,
            send=self.send,
            usable=not identity.sandbox,
            copies=lambda: self.copies.summary(),
        )
        self.kept = Kept()
        self.keepers = replicas.neighbours(identity.nnodes, identity.nproc)
        """Who keeps whose records, by rank."""
        self.replicas: tuple[int, ...] = ()
        """By rank, the first rank that holds the same; known after the first vote."""
        self.late = False  # whether what a rank alone holds changes after votes, here or anywhere
        self.mark = ""  # what its checkpoints tell this job from others by
        self.resume = environment.resume  # from another job's checkpoint
        self.copies = Copies(
            fabric, job=identity.job, every=self.config.copy_every, nodes=self.config.copies
        )
        self.pace = Pace(fabric)
        self.stage = Stage(self.die, self.isolation.draw, unwind_s=self.config.unwind_s)
        self.siblings = Siblings(fabric.wiring, identity, patience_s=self.config.sibling_s)
        self.prepare: Prepare | None = None
        """The planned move this worker prepares or has prepared."""
        self.aborted: set[int] = set()
        self.recover: Callable[[], None] | None = None
        """How to get out of a revoked world, once there is a session that knows."""
        self.links_before = 0  # opened before the last world was prepared; for the trace
        self._prepared = 0
        """The last epoch this worker has said to be ready for."""
        fabric.on_broken = self._broken
        if self.injector:
            fabric.on_halfway = self._halfway
        if identity.sandbox:
            fabric.rehearse(identity.rank, identity.world_size)

    @property
    def worker(self) -> str:
        """The name of this process."""
        return self.identity.worker

    def become(self, identity: Identity) -> None:
        """Be `identity` from now on: for the script's environment and for the trace too."""
        self.isolation.follow(identity)
        self.identity = identity
        self.trace.identity = identity
        identity.export()

    def send(self, event: FromAgent) -> None:
        """Tell the controller, through the agent."""
        self.control.send(event)

    def pulse(self, step: int) -> None:
        """Tell the agent how far this worker is, for its next heartbeat."""
        self.pace.applied()
        local_rank = self.identity.local_rank
        self.control.note(wire.Pulse(local_rank=local_rank, step=step, phase="training"))

    def look(self) -> wire.Pace | None:
        """Return how this rank gets on, in the control thread; None if there is nothing to say."""
        step = self.standing.rank.step
        said = None if step is None else self.pace.look(step)
        local_rank = self.identity.local_rank
        return None if said is None else wire.Pace(local_rank=local_rank, progress=said)

    def form(self) -> None:
        """Wait until all slots are up, and connect the first world."""
        standing = self.standing
        if self.identity.sandbox or standing.world is not None:
            return
        standing.wait(
            lambda: standing.start is not None or standing.stop is not None, timeout_s=1e9
        )
        standing.raise_if_stopped()
        assert standing.start is not None
        plan = standing.start.plan
        try:
            self.fabric.form(plan, timeout_s=FORM_TIMEOUT_S)
        except (LinkError, Interrupted) as error:
            self._await_another_start(plan.epoch, error)
        with standing.changing():
            standing.world = plan
            standing.rank = rules.start(standing.rank, plan.epoch)
        self.trace.write("formed", epoch=plan.epoch)

    def _await_another_start(self, epoch: int, error: LinkError | Interrupted) -> NoReturn:
        """Wait to be ended: another rank was lost, and all are started afresh, this one too.

        To end here would look like this script's own failure if it were heard before that loss.
        """
        standing = self.standing
        peers = error.peers if isinstance(error, LinkError) else ()
        self.fabric.revoke(epoch, str(error))
        standing.accuse(epoch, peers, str(error))
        standing.at_safe_point = True
        standing.report(epoch)
        while standing.wait_for_order(
            lambda: standing.stop is not None or standing.owes_report(),
            silent_s=self.config.fence_after_s,
        ):
            standing.raise_if_stopped()
            standing.report()
        raise error

    def finish(self) -> None:
        """Wait, after the script, until all ranks have finished; help with recoveries meanwhile."""
        standing = self.standing
        if self.identity.sandbox:
            msg = "the script ended its rehearsal without entering session.steps()"
            raise ConfigError(msg)
        self.injector.at(Point.AT_FINISH, standing.rank.step)
        step = NO_STEP if standing.rank.step is None else standing.rank.step
        while standing.stop is None:
            self.send(Finished(job=self.identity.job, worker=self.worker, step=step))
            standing.at_safe_point = True
            standing.wait(
                lambda: (
                    standing.stop is not None or standing.rank.interrupted or standing.owes_report()
                ),
                timeout_s=FINISHED_AGAIN_S,
            )
            if standing.stop is None and standing.rank.interrupted and self.recover is not None:
                self.recover()
            elif standing.owes_report():
                standing.report()

    def die(self, why: str) -> NoReturn:
        """End this process at once, where no exception would get through."""
        self.isolation.close()
        print(f"tmover: {why}", file=sys.stderr)
        local_rank, phase = self.identity.local_rank, f"{wire.ERROR_PHASE}{why}"
        self.control.send(wire.Pulse(local_rank=local_rank, step=NO_STEP, phase=phase))
        sys.stdout.flush()
        sys.stderr.flush()
        self.control.close()
        os._exit(1)

    def close(self) -> None:
        """Close links, threads and files."""
        self.isolation.close()
        with self.standing.changed:
            stop = self.standing.stop
        self.copies.close()
        self.fabric.close(bye=stop is not None and stop.code == 0)
        self.trace.close()

    # --- orders, in the control thread ------------------------------------------------------------

    def on_message(self, message: wire.FromController) -> None:
        """Act on what the agent passed on."""
        self.standing.hear()
        match message:
            case Start():
                with self.standing.changing():
                    self.standing.start = message
            case Prepare():
                self._on_prepare(message)
            case Arm(epoch=epoch):
                self._on_arm(epoch)
            case Abort(epoch=epoch):
                self._on_abort(epoch)
            case Revoke(epoch=epoch, reason=reason):
                self._on_revoke(epoch, reason)
            case Assign():
                self._on_assign(message)
            case Done(epoch=epoch):
                self._on_done(epoch)
            case Stop():
                with self.standing.changing():
                    self.standing.stop = message
            case Welcome() if message.launch == self.launch or message.job != self.identity.job:
                self.standing.told(message)

    def _on_prepare(self, order: Prepare) -> None:
        epoch = order.plan.epoch
        known = self.prepare is not None and self.prepare.plan.epoch == epoch
        if known or epoch <= self.standing.rank.epoch or epoch in self.aborted:
            if known and self._prepared == epoch:
                self.say_prepared(epoch)
            return
        with self.standing.changing():
            self.prepare = order
        if self.standing.rank.epoch == 0:
            return  # a standby rebinds in its main thread, which waits for this
        threading.Thread(
            target=self._open_links, args=(order,), name="tmover-prepare", daemon=True
        ).start()

    def say_prepared(self, epoch: int) -> None:
        """Tell the controller that this worker can switch to `epoch`; again if it asks again."""
        self._prepared = epoch
        self.send(Prepared(job=self.identity.job, worker=self.worker, epoch=epoch))

    def _open_links(self, order: Prepare) -> None:
        """Phase 1 on a member: open what the joiner needs, beside the running training."""
        epoch = order.plan.epoch
        self.trace.write("prepare_begin", epoch=epoch)
        try:
            if order.plan.rank_of(self.worker) is not None:
                self.injector.at(Point.IN_PREPARE, self.standing.rank.step)
                self.prepare_links(order.plan)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the controller waits for a word
            reason = str(error) if isinstance(error, TmoverError) else repr(error)
            self.send(
                PrepareFailed(job=self.identity.job, worker=self.worker, epoch=epoch, reason=reason)
            )
            return
        self.trace.write("prepared", epoch=epoch)
        self.say_prepared(epoch)

    def prepare_links(self, plan: Plan, *, relink: Sequence[tuple[str, str]] = ()) -> None:
        """Open what `plan` needs beside what exists, and park it."""
        self.links_before = self.fabric.links_opened
        self.fabric.prepare(plan, timeout_s=CONNECT_TIMEOUT_S, relink=relink)

    def _on_arm(self, epoch: int) -> None:
        if self.prepare is not None and self.prepare.plan.epoch == epoch:
            self.standing.arm(epoch)
            self.trace.write("armed", epoch=epoch)

    def _on_abort(self, epoch: int) -> None:
        if not self.standing.abort(epoch):
            return  # in doubt about this epoch: only a report and an answer to it can end that
        if self.prepare is not None and self.prepare.plan.epoch == epoch:
            self.fabric.rollback(epoch)
        with self.standing.changing():
            self.aborted.add(epoch)
            if self.prepare is not None and self.prepare.plan.epoch == epoch:
                self.prepare = None

    def _on_revoke(self, epoch: int, reason: str) -> None:
        standing = self.standing
        current = standing.rank.epoch
        standing.revoke(epoch)
        self.fabric.revoke(epoch, reason)
        self.trace.write("revoked", epoch=epoch, reason=reason)
        standing.asked(epoch)
        if epoch != current and not standing.at_safe_point:
            standing.report()  # says where the training stands; it goes on undisturbed

    def _on_assign(self, order: Assign) -> None:
        standing = self.standing
        epoch = standing.rank.epoch
        with standing.changing():
            newest = standing.assign is None or order.plan.epoch > standing.assign.plan.epoch
            if not newest or order.plan.epoch <= epoch:
                return
            standing.assign = order
            self.prepare = None
        if epoch:
            standing.revoke(epoch)
            self.fabric.revoke(epoch, "the controller assigned another world")

    def _on_done(self, epoch: int) -> None:
        with self.standing.changing():
            self.standing.released = max(self.standing.released, epoch)
        if self.standing.rank.epoch == epoch:
            self.fabric.release(epoch)

    # --- what the communicator says, in whatever thread -------------------------------------------

    def _broken(self, epoch: int, peers: tuple[str, ...], reason: str) -> None:
        self.trace.write("revoked", epoch=epoch, reason=reason, peers=list(peers))
        self.standing.accuse(epoch, peers, reason)

    def hand_record_on(self, record: bytes, *, epoch: int | None = None) -> bytes:
        """Give this rank's records to its keeper; return those of its ward. See `vote`."""
        if self.identity.nnodes == 1:
            return b""
        return self.fabric.hand_on(
            record, to=self.keepers[self.identity.rank], source=self.ward(), epoch=epoch
        )

    def ward(self) -> int:
        """Return the rank whose records this one keeps."""
        return self.keepers.index(self.identity.rank)

    def serve_copies(self, plan: Plan) -> None:
        """Exchange copies with keepers and wards in this world, if this job needs them."""
        self.copies.serve(plan, rank=self.identity.rank, nproc=self.identity.nproc)

    def share(self, holdings: Sequence[Holding]) -> None:
        """Let replicas keep each other's records, as a vote has shown who is one of whom.

        Where there are none, copies are kept on as many nodes as is set on rank 0.
        """
        digests = [holding.digest for holding in holdings]
        same, late = tuple(map(digests.index, digests)), any(each.late for each in holdings)
        if same == self.replicas and (not late or self.copies.active):
            return
        if self.replicas not in ((), same) and self.identity.rank == 0:
            logger.warning(refusals.PARTED)
        is_first, self.replicas, self.late = not self.replicas, same, late
        nnodes = self.identity.nnodes
        if nnodes == 1:
            return
        found = None if late else replicas.keepers(digests, self.identity.nproc)
        nodes = 0 if found else copies.with_room(holdings[0].copies, nnodes=nnodes, strict=is_first)
        self.keepers = found or self.keepers
        self.copies.follow(nodes)
        if self.standing.world is not None:
            self.serve_copies(self.standing.world)
        job, worker, launch = self.identity.job, self.worker, self.launch
        self.send(Sharing(job=job, worker=worker, launch=launch, keepers=found or (), copies=nodes))

    def _halfway(self, kind: Kind) -> None:
        """Do the faults that are due inside a vote or a barrier (only while any are to come)."""
        step = self.standing.rank.step
        if kind is Kind.VOTE:
            self.injector.at(Point.IN_VOTE, NO_STEP if step is None else step + 1)
        else:
            self.injector.at(Point.IN_BARRIER, step)

    def sync(self) -> bool:
        """Take over a revocation that the links brought; return whether training is interrupted."""
        standing = self.standing
        if self.fabric.mode is Mode.REVOKED:
            standing.revoke(standing.rank.epoch)
        return standing.rank.interrupted
