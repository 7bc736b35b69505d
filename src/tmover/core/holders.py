"""After a revocation: the step at which all will stand, and who holds what of it."""

from __future__ import annotations

from collections.abc import Mapping

from tmover.core import copies, replicas
from tmover.core import epoch as epochs
from tmover.core.events import Reported
from tmover.core.phase import Loss
from tmover.core.roster import Job


def step_of(job: Job, loss: Loss) -> int | None:
    """Return the step all will stand at: the decided one, or that of copies to return to."""
    return _copied_step(job, loss) if job.copies else decided_step(job, loss)


def decided_step(job: Job, loss: Loss) -> int | None:
    """Return the step all will stand at, or None if nobody is left that holds the state."""
    found = job.standings(job.workers(epochs.living(job, loss)))
    steps = [report.step for report in found if report.step is not None]
    floor = [] if job.floor is None else [job.floor]
    return max([*steps, *floor]) if steps else None


def _copied_step(job: Job, loss: Loss) -> int | None:
    """Return the step to whose copies all return, None if those of a rank are lost."""
    found = job.standings(job.workers(epochs.living(job, loss)))
    by_worker = {report.worker: report for report in found}
    workers = job.workers(job.slots)
    held = [copies.held_of(r, by_worker.get(worker), found) for r, worker in enumerate(workers)]
    return copies.newest(held)


def copied(job: Job, step: int) -> dict[str, str]:
    """Return who sends the copies of `step`, by receiving worker."""
    return copies.sources(step, dict(enumerate(job.workers(job.slots))), _copying(job))


def sources(job: Job, step: int) -> dict[str, str]:
    """Return who sends its state, by receiving worker: the keeper of its records."""
    keeper, known = _keepers(job), _standings(job)
    return {
        worker: keeper[rank]
        for rank, worker in enumerate(job.workers(job.slots))
        if not _reaches(known, worker, step)
    }


def helpers(job: Job, given: Mapping[str, str], step: int) -> dict[str, tuple[str, ...]]:
    """Return who else holds at `step` what a receiver is to have, by receiving worker."""
    seated = job.workers(job.slots)
    known = () if job.copies else job.keepers
    standings = _standings(job)
    fit = [worker for worker in seated if _keeps(standings, worker, step)]
    return replicas.helpers(given, seated, known, fit=fit)


def forgotten(job: Job, step: int) -> tuple[int, ...]:
    """Return the slots whose own records as of `step` nobody is left to hand over.

    A joiner that has not passed its first barrier holds its own records and not yet its ward's.
    """
    keeper, known = _keepers(job), _standings(job)
    return tuple(
        rank // job.nproc
        for rank, worker in enumerate(job.workers(job.slots))
        if not _reaches(known, worker, step) and not _keeps(known, keeper[rank], step)
    )


def writers(job: Job, step: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks whose parts of a checkpoint of `step` each worker can write, own first.

    The part of a rank that does not hold the state is written by who keeps it for that rank.
    """
    found: dict[str, tuple[int, ...]] = {}
    absent: list[tuple[int, str]] = []
    known, standings, keepers = _copying(job), _standings(job), _keepers(job)
    for rank, worker in enumerate(job.workers(job.slots)):
        own = known.get(worker)
        if job.copies and (own is None or step not in own.own):
            absent.append((rank, _keeper_of_copy(known, rank, step)))
        elif not job.copies and not _reaches(standings, worker, step):
            absent.append((rank, keepers[rank]))
        else:
            found[worker] = (rank,)
    for rank, keeper in absent:
        found[keeper] = (*found.get(keeper, ()), rank)
    return found


def _keeper_of_copy(known: Mapping[str, Reported], rank: int, step: int) -> str:
    return next(name for name, said in known.items() if step in said.kept.get(rank, ()))


def _copying(job: Job) -> dict[str, Reported]:
    """Return what those who may hold copies have reported, by worker."""
    leavers = job.workers(filter(job.is_alive, job.unreleased.values()))
    reports = job.standings(dict.fromkeys([*job.workers(job.slots), *leavers]))
    return {report.worker: report for report in reports}


def _keepers(job: Job) -> list[str]:
    """Return the worker that keeps the records of each rank, and holds what it holds."""
    keepers = job.keepers or replicas.neighbours(job.nnodes, job.nproc)
    workers = job.workers(job.slots)
    return [workers[keeper] for keeper in keepers]


def _standings(job: Job) -> dict[str, Reported]:
    """Return where each worker with a rank stands, as far as it has reported."""
    return {report.worker: report for report in job.standings(job.workers(job.slots))}


def _keeps(known: Mapping[str, Reported], worker: str, step: int) -> bool:
    """Return whether a worker holds its ward's records as of `step`."""
    return _reaches(known, worker, step) and known[worker].epoch > 0


def _reaches(known: Mapping[str, Reported], worker: str, step: int) -> bool:
    """Return whether a worker stands at `step`, or can apply it from the gradients it holds."""
    said = known.get(worker)
    return said is not None and step in (said.step, said.doubt)
