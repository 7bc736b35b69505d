"""How a job comes to the controller: by a person's request, or because Slurm has requeued one."""

from __future__ import annotations

import asyncio
import logging
import pathlib
from collections.abc import Callable
from typing import Union

from tmover import wire
from tmover.config import slurm_job
from tmover.controller import keys, requests
from tmover.controller.desk import Desk
from tmover.core.events import Submitted
from tmover.core.phase import Stage
from tmover.core.roster import Job
from tmover.errors import Refused, SchedulerError
from tmover.scheduler.interface import Allocations

logger = logging.getLogger(__name__)


class Intake:
    """Names new jobs, and has their secrets and what they need of the scheduler kept."""

    def __init__(self, state: pathlib.Path, desk: Desk, allocations: Allocations | None) -> None:
        self._state = state
        self._desk = desk
        self._allocations = allocations
        self._vouching: set[asyncio.Task[None]] = set()

    def vouch(self, user: str, request: wire.SubmitRequest, then: Callable[[str], object]) -> None:
        """Find out whether the job is the user's; `then` is told why not, "" if it is."""
        task = asyncio.ensure_future(self._vouch(user, request, then))
        self._vouching.add(task)
        task.add_done_callback(self._vouching.discard)

    async def _vouch(
        self, user: str, request: wire.SubmitRequest, then: Callable[[str], object]
    ) -> None:
        spec, allocations, refusal = request.slurm, self._allocations, ""
        try:
            if spec is None or allocations is None:
                pass  # refused when its turn comes
            elif not await asyncio.to_thread(allocations.belongs, spec, user):
                refusal = f"Slurm has no job {spec.id} of {user}"
        except SchedulerError as error:
            refusal = str(error)
        except Exception:  # one message's trouble is not the others'
            logger.exception("could not look into %s", request)
            refusal = requests.INTERNAL_ERROR
        then(refusal)

    def submitted(self, request: wire.SubmitRequest) -> Union[Submitted, str]:
        """Return the event of a new job, or the name of the one that this asks for again.

        Raises `Refused`, or `SchedulerError` if what it needs cannot be kept.
        """
        if request.slurm is None:
            event = requests.submitted(request, self._desk.new_id())
            keys.make_secret(self._state, event.job)
            return event
        name = slurm_job(request.slurm.id)
        event = requests.submitted(request, name)
        known = self._desk.ledgers.get(name)
        if known is not None and known.job.owner != request.owner:
            msg = f"job {name} is not {request.owner}'s"
            raise Refused(msg)
        if known is not None and known.job.phase.stage is Stage.ENDED:
            msg = (
                f"job {name} has ended here already: if Slurm counts its jobs anew, "
                "use another state directory"
            )
            raise Refused(msg)
        if known is not None:
            return name
        if self._allocations is None:
            msg = "this controller cannot ask Slurm: squeue and scontrol are not on its machine"
            raise Refused(msg)
        self._allocations.adopt(name, request.owner, request.slurm)
        keys.make_secret(self._state, name)
        return event

    def requeued(self, job: Job, name: str) -> Submitted | None:
        """Return the event of a requeued job's next incarnation; None if it is here already."""
        if name in self._desk.ledgers:
            return None
        keys.make_secret(self._state, name)
        return Submitted(
            job=name,
            nnodes=job.nnodes,
            nproc=job.nproc,
            owner=job.owner,
            standby=job.reserve,
            allocated=True,
            pool=job.pool,
        )
