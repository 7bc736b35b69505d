"""How a job comes to the controller: by a person's request, or because Slurm has requeued one."""

from __future__ import annotations

import pathlib
from typing import Union

from tmover import wire
from tmover.config import slurm_job
from tmover.controller import keys, requests
from tmover.controller.desk import Desk
from tmover.core.events import Submitted
from tmover.core.phase import Stage
from tmover.core.roster import Job
from tmover.errors import Refused
from tmover.scheduler.interface import Allocations


class Intake:
    """Names new jobs, and has their secrets and what they need of the scheduler kept."""

    def __init__(self, state: pathlib.Path, desk: Desk, allocations: Allocations | None) -> None:
        self._state = state
        self._desk = desk
        self._allocations = allocations

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
            msg = f"job {name} is {known.job.owner}'s"
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
        )
