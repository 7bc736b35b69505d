"""What Slurm holds for a job, read from its list of jobs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tmover import wire
from tmover.scheduler.hostlist import fold
from tmover.scheduler.interface import Allocation, Fate
from tmover.scheduler.slurm.commands import JobInfo
from tmover.scheduler.slurm.render import tag
from tmover.scheduler.slurm.states import JobState

_STOPPED = (
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.DEADLINE,
    JobState.PREEMPTED,
    JobState.REVOKED,
)
"""Ends that somebody, or a limit, wanted."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is on disk of one job, for its owner only: its environment may hold secrets."""

    owner: str
    restarts: int = 0
    """How often Slurm had requeued it."""
    spec: wire.SlurmSpec


def describe(job: str, kept: Kept, jobs: Iterable[JobInfo], *, at: float = 0.0) -> Allocation:
    """Return what Slurm held for a job when it was asked. Others' jobs do not count."""
    jobs = [info for info in jobs if info.user == kept.owner]
    main = main_of(kept, jobs)
    id_ = kept.spec.id
    others = standbys_of(job, kept, jobs)
    if main is None:
        fate, text = Fate.MISSING, f"Slurm does not know job {id_} any more"
    elif main.restarts > kept.restarts:
        fate, text = Fate.REQUEUED, f"Slurm has requeued job {id_}"
    elif main.state in _STOPPED:
        fate, text = Fate.STOPPED, _ENDS.get(main.state, "Slurm job {} was ended").format(id_)
    elif main.state.is_over:
        fate, text = Fate.ENDED, f"Slurm job {id_} has ended ({main.state.value})"
    else:
        fate = Fate.PENDING if main.state.is_pending else Fate.RUNNING
        text = _words(main, "Slurm job")
    return Allocation(
        job=job,
        fate=fate,
        text=text,
        standbys=tuple(_words(one, "standby job") for one in others),
        standby_nodes=tuple(node for one in others for node in one.nodes),
        at=at,
    )


_ENDS: Mapping[JobState, str] = {
    JobState.CANCELLED: "Slurm job {} was cancelled",
    JobState.TIMEOUT: "Slurm job {} has reached its time limit",
    JobState.DEADLINE: "Slurm job {} has reached its deadline",
    JobState.PREEMPTED: "Slurm job {} was preempted",
}


def _words(info: JobInfo, what: str) -> str:
    """Return one of Slurm's jobs in a few words."""
    where = f" on {fold(info.nodes)}" if info.nodes else ""
    reason = "" if info.reason in {"", "None"} else f" ({info.reason})"
    return f"{what} {info.id} {info.state.value}{where}{reason}"


def main_of(kept: Kept, jobs: Iterable[JobInfo]) -> JobInfo | None:
    """Return the main allocation. Another user's job is none, whatever was said of its id."""
    id_ = str(kept.spec.id)
    return next((info for info in jobs if info.id == id_ and info.user == kept.owner), None)


def standbys_of(job: str, kept: Kept, jobs: Iterable[JobInfo]) -> list[JobInfo]:
    """Return the standby jobs of `job` that have not ended; anybody may write its comment."""
    ours = [info for info in jobs if info.comment == tag(job) and info.user == kept.owner]
    return [info for info in ours if is_there(info) and info.id != str(kept.spec.id)]


def is_there(info: JobInfo) -> bool:
    """Return whether a job has not ended. One that only waits for a dead node to be cleaned has."""
    return not info.state.is_over and not info.state.is_ending


def may_come(kept: Kept, main: JobInfo) -> bool:
    """Return whether Slurm runs a job again that nobody has cancelled, or has yet to say so."""
    return main.state.is_ending or (main.restarts > kept.restarts and not main.state.is_over)
