"""Jobs in Slurm's allocations: what is held for them, standbys ordered, nodes given back, the end.

A job is one main allocation, made by `tmover submit`, and one-node standby jobs of the same script,
which are found by their comment: they are Slurm's own memory of what belongs to whom, so that a
restarted controller orders nothing twice and leaves nothing behind. A running allocation only
shrinks. Every call here may be repeated.
"""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec
from typing_extensions import assert_never

from tmover import wire
from tmover.config import Config, SlurmConfig, StandbyConfig, slurm_job
from tmover.core.events import REQUEUE
from tmover.core.orders import EndJob, EndNode, Errand, OrderNode, ReassignNode, ReleaseNode
from tmover.errors import ResizeRefused, SchedulerError
from tmover.owner import user_name
from tmover.scheduler.interface import Allocation, NodeInfo, Outcome
from tmover.scheduler.slurm.client import SlurmClient
from tmover.scheduler.slurm.commands import JobInfo
from tmover.scheduler.slurm.held import Kept, describe, is_there, main_of, may_come, standbys_of
from tmover.scheduler.slurm.poller import Poller
from tmover.scheduler.slurm.render import standby_environment, standby_options, standby_script, tag
from tmover.scheduler.slurm.run import Run, run_command
from tmover.scheduler.store import write_whole

logger = logging.getLogger(__name__)


class SlurmAllocations:
    """Implements `Allocations`. Used by several threads of the controller."""

    def __init__(
        self,
        directory: pathlib.Path,
        config: SlurmConfig,
        standby: StandbyConfig,
        *,
        poller: Poller,
        client_of: Callable[[str], SlurmClient],
        rpcs: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep files in `directory`. `client_of` an owner runs Slurm's commands as that user."""
        self._directory = directory
        self._config = config
        self._standby = standby
        self._poller = poller
        self._client_of = client_of
        self._rpcs = rpcs
        self._clock = clock
        self._ending: dict[str, float] = {}
        """Since when a job is being ended."""
        self._unreadable: set[str] = set()
        """Jobs of which it was logged that nothing is known."""
        self._resizing = threading.Lock()
        """One allocation shrinks at a time: each says which nodes it keeps."""

    # --- which jobs -------------------------------------------------------------------------------

    def adopt(self, job: str, owner: str, spec: wire.SlurmSpec) -> None:
        """Keep what is needed to ask for standbys of `job`."""
        self._keep(job, Kept(owner=owner, spec=spec))
        self._poller.nudge()  # the last poll may have been before it was submitted

    def belongs(self, spec: wire.SlurmSpec, owner: str) -> bool:
        """Return whether Slurm has the job, as the owner's."""
        jobs = self._client_of(owner).jobs({owner})
        return any(info.id == str(spec.id) and info.user == owner for info in jobs)

    def succeed(self, job: str) -> str:
        """Adopt the next incarnation of a requeued job; return its name."""
        kept = self._kept(job)
        main = main_of(kept, self._poller.snapshot(self._clock()).jobs)
        restarts = kept.restarts + 1 if main is None else max(main.restarts, kept.restarts + 1)
        name = slurm_job(kept.spec.id, restarts)
        if not self._file(name).exists():  # once: this job's own may have been cleared by now
            self._keep(name, msgspec.structs.replace(kept, restarts=restarts))
        return name

    def forsake(self, job: str) -> None:
        """Cancel what Slurm has requeued: the job lives on its standbys' nodes."""
        kept = self._kept(job)
        client = self._client_of(kept.owner)
        main = main_of(kept, client.jobs({kept.owner}))
        if main is not None and is_there(main) and main.restarts > kept.restarts:
            client.cancel([main.id])
            text = f"Slurm job {main.id} was requeued without need, and is cancelled"
            logger.warning("job %s: %s", job, text, extra={"job_id": job})
            self._poller.nudge()

    # --- what is known ----------------------------------------------------------------------------

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, as of the last poll."""
        snapshot = self._poller.snapshot(self._clock())
        return [
            NodeInfo(name=node.name, address=node.address, state=node.state, reason=node.reason)
            for node in snapshot.nodes
        ]

    def look(self, jobs: Collection[str]) -> list[Allocation]:
        """Return what is held for the jobs, as of the last poll, less those that are not known."""
        snapshot = self._poller.snapshot(self._clock())
        found = []
        for job in jobs:
            try:
                kept = self._kept(job)
            except SchedulerError as error:  # one job's trouble is not the others'
                if job not in self._unreadable:
                    logger.error("%s; the job is not looked after", error, extra={"job_id": job})
                self._unreadable.add(job)
                continue
            found.append(describe(job, kept, snapshot.jobs, at=snapshot.at))
        self._unreadable &= {*jobs} - {one.job for one in found}
        return found

    def nudge(self) -> None:
        """Poll soon."""
        self._poller.nudge()

    def load(self) -> str:
        """Return how much slurmctld is asked, and that it does not answer, in a few words."""
        text = f"Slurm is asked {self._rpcs()} RPCs per minute"
        trouble = self._poller.trouble()
        if not trouble:
            return text
        return f"{text}; it does not answer, its jobs are shown as they were before: {trouble}"

    # --- what is to be done -----------------------------------------------------------------------

    def carry_out(self, errand: Errand) -> Outcome:
        """Do what `decide` asks for."""
        match errand:
            case OrderNode():
                return self._order(errand)
            case EndNode():
                return self._take_away(errand.job, errand.node, is_sick=True)
            case ReleaseNode():
                return self._take_away(errand.job, errand.node, is_sick=False)
            case ReassignNode():
                return self._reassign(errand)
            case EndJob():
                return self._end(errand)
            case _:
                assert_never(errand)

    def _order(self, order: OrderNode) -> Outcome:
        """Have `total` standbys on order: pending, or starting on a node where none has joined."""
        kept = self._kept(order.job)
        client = self._client_of(kept.owner)
        held = standbys_of(order.job, kept, client.jobs({kept.owner}))
        on_order = [one for one in held if not one.nodes or not set(one.nodes) <= {*order.exclude}]
        if len(on_order) >= order.total:
            return Outcome.done()
        spec = kept.spec
        taken = {*order.exclude, *(node for one in held for node in one.nodes)}
        options = standby_options(
            spec.options, self._standby, job=order.job, name=spec.name, exclude=sorted(taken)
        )
        state = spec.env.get("TMOVER_STATE", str(self._directory.parent))
        made = client.submit(
            options,
            standby_script(spec.script),
            env=standby_environment(spec.env, state=state, job=order.job),
            cwd=pathlib.Path(spec.cwd),
            args=spec.arguments,
        )
        self._poller.nudge()
        text = f"standby ordered: Slurm job {made}"
        logger.info("job %s: %s", order.job, text, extra={"job_id": order.job})
        return Outcome.done(text)

    def _take_away(self, job: str, node: str, *, is_sick: bool) -> Outcome:
        """Take a node from the job: end its standby job, or shrink the main allocation."""
        kept = self._kept(job)
        client = self._client_of(kept.owner)
        with self._resizing:
            jobs = client.jobs({kept.owner})
            own = [one for one in standbys_of(job, kept, jobs) if node in one.nodes]
            if own:
                return self._cancel(client, f"{job} {node}", own, at_once=is_sick)
            self._ending.pop(f"{job} {node}", None)
            main = main_of(kept, jobs)
            is_ours = main is not None and main.restarts == kept.restarts
            if main is None or not is_ours or not main.state.is_running or node not in main.nodes:
                return Outcome.done()
            return self._shrink(client, kept, main, node)

    def _reassign(self, change: ReassignNode) -> Outcome:
        """Have a standby job known as the other job's from now on."""
        kept = self._kept(change.job)
        client = self._client_of(kept.owner)
        jobs = client.jobs({kept.owner})
        own = [one for one in standbys_of(change.job, kept, jobs) if change.node in one.nodes]
        for one in own:
            client.set_comment(one.id, tag(change.to))
        self._poller.nudge()
        return Outcome.done()

    def _shrink(self, client: SlurmClient, kept: Kept, main: JobInfo, node: str) -> Outcome:
        if not kept.spec.headless and node == main.batch_host:
            why = "it is the batch host"
        elif len(main.nodes) == 1:
            why = "it is the last one"
        else:
            try:
                client.shrink(main.id, [name for name in main.nodes if name != node])
            except ResizeRefused as error:
                if not error.is_final:
                    raise
                why = str(error)
            else:
                self._poller.nudge()
                return Outcome.done(f"{node} is given back to Slurm")
        return Outcome.done(f"{node} stays allocated until Slurm job {main.id} ends: {why}")

    def _end(self, end: EndJob) -> Outcome:
        """End what is left of the job, after giving it the time to end by itself.

        What Slurm has requeued, as the job wanted it to, is left to the next incarnation.
        """
        kept = self._kept(end.job)
        client = self._client_of(kept.owner)
        jobs = client.jobs({kept.owner})
        main = main_of(kept, jobs)
        left = standbys_of(end.job, kept, jobs)
        is_next = main is not None and self._has_next(kept, main)
        is_coming = end.code == REQUEUE and main is not None and may_come(kept, main)
        if main is not None and is_there(main) and not is_next and not is_coming:
            left.append(main)
        outcome = self._cancel(client, end.job, left, at_once=False)
        if outcome.is_done and is_coming and not is_next:
            outcome = Outcome.not_yet()
        if outcome.is_done and kept.spec.env:  # it may hold secrets, and nothing is submitted more
            spec = msgspec.structs.replace(kept.spec, env={}, script="")
            self._keep(end.job, msgspec.structs.replace(kept, spec=spec))
        return outcome

    def _has_next(self, kept: Kept, main: JobInfo) -> bool:
        """Return whether a later incarnation of the job has the main allocation."""
        later = range(kept.restarts + 1, main.restarts + 1)
        return any(self._file(slurm_job(kept.spec.id, n)).exists() for n in later)

    def _cancel(
        self, client: SlurmClient, key: str, jobs: Sequence[JobInfo], *, at_once: bool
    ) -> Outcome:
        """Have the jobs end; those that run may end by themselves for a while."""
        if not jobs:
            self._ending.pop(key, None)
            return Outcome.done()
        since = self._ending.setdefault(key, self._clock())
        is_due = at_once or self._clock() - since > self._config.end_s
        over = [one.id for one in jobs if is_due or one.state.is_pending]
        if over:
            client.cancel(over)
            self._poller.nudge()
        if not at_once:
            return Outcome.not_yet()
        del self._ending[key]
        return Outcome.done()

    # --- on disk ----------------------------------------------------------------------------------

    def _keep(self, job: str, kept: Kept) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            msg = f"cannot make {self._directory}: {(error.strerror or str(error)).lower()}"
            raise SchedulerError(msg) from error
        # the journal, which is on disk whatever happens, names jobs that need this to be ended
        write_whole(self._file(job), msgspec.json.encode(kept), is_durable=True)

    def _kept(self, job: str) -> Kept:
        try:
            return msgspec.json.decode(self._file(job).read_bytes(), type=Kept)
        except (OSError, msgspec.DecodeError) as error:
            msg = (
                f"what is known of job {job} cannot be read from {self._file(job)}: {error}; "
                "restore it, or end the jobs in Slurm yourself: `scancel`"
            )
            raise SchedulerError(msg) from error

    def _file(self, job: str) -> pathlib.Path:
        return self._directory / f"{job}.json"


def slurm_allocations(
    state: pathlib.Path, config: Config, run: Run = run_command
) -> SlurmAllocations | None:
    """Return the allocations that a controller looks after; None where Slurm has no commands.

    Root asks for everybody's jobs, and does what a job needs as the job's owner.
    """
    if run is run_command and shutil.which("squeue") is None:
        return None
    is_root = os.geteuid() == 0
    timeout_s = config.slurm.command_s
    client = SlurmClient(run, timeout_s=timeout_s)
    users = None if is_root else {user_name()}
    poller = Poller(client, users=users, poll_s=config.slurm.poll_s, most_s=config.slurm.back_off_s)
    clients: dict[str, SlurmClient] = {}

    def client_of(owner: str) -> SlurmClient:
        if owner == user_name() or not is_root:
            return client
        return clients.setdefault(owner, SlurmClient(run, user=owner, timeout_s=timeout_s))

    return SlurmAllocations(
        state / "slurm",
        config.slurm,
        config.standby,
        poller=poller,
        client_of=client_of,
        rpcs=lambda: sum(each.rpcs_per_minute() for each in [client, *clients.values()]),
    )
