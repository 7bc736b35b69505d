"""What people ask, as events. Pure: a request and a job's status in, an event or a refusal out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Union

from tmover import wire
from tmover.controller.desk import Ledger
from tmover.controller.journal import Entry
from tmover.core.events import CancelRequested, MoveRequested, NodeReady, Submitted
from tmover.core.orders import Action, Note
from tmover.core.phase import Stage
from tmover.errors import Refused

MAX_RANKS = 100_000
MAX_NODES = 10_000
MAX_NAME = 64
"""Characters of a pool's name."""
INTERNAL_ERROR = "an internal error, see the controller's log"


def submitted(request: wire.SubmitRequest, job: str) -> Submitted:
    """Return the event of a new job. Raises `Refused` if there can be none such."""
    nnodes, nproc = request.nnodes, request.nproc
    if request.slurm is not None and not nproc:
        nproc = 1  # the agents tell
    if not (1 <= nnodes <= MAX_NODES and nproc >= 1 and nnodes * nproc <= MAX_RANKS):
        msg = (
            f"a job of {nnodes} nodes x {nproc} ranks: "
            f"1 to {MAX_RANKS} ranks on at most {MAX_NODES} nodes can be looked after"
        )
        raise Refused(msg)
    if request.slurm is not None and request.slurm.id < 1:
        msg = f"Slurm has no job {request.slurm.id}"
        raise Refused(msg)
    if not (0 < len(request.owner) <= MAX_NAME and request.owner.isprintable()):
        msg = f"an owner's name has 1 to {MAX_NAME} characters"
        raise Refused(msg)
    if not fits_pool(request.pool):
        msg = f"pool {request.pool!r}: write a name of up to {MAX_NAME} letters, digits, . _ or -"
        raise Refused(msg)
    return Submitted(
        job=job,
        nnodes=request.nnodes,
        nproc=request.nproc,
        owner=request.owner,
        standby=request.standby,
        allocated=request.slurm is not None,
        pool=request.pool,
    )


def fits_pool(name: str) -> bool:
    """Return whether a pool may be called so; "" is none.

    >>> fits_pool("llama-8b"), fits_pool(""), fits_pool("a b")
    (True, True, False)
    """
    return not name or re.fullmatch(rf"[\w.-]{{1,{MAX_NAME}}}", name, re.ASCII) is not None


def choose(ledgers: Mapping[str, Ledger], job: str | None) -> str:
    """Return the job meant: by its name, or by Slurm's id, which means its last incarnation.

    Raises `Refused` if it is unknown, or None and not the only one.
    """
    if job is not None:
        incarnations = [n for n in ledgers if re.fullmatch(f"slurm{re.escape(job)}(r[0-9]+)?", n)]
        if job not in ledgers and not incarnations:
            raise Refused(unknown(job))
        return job if job in ledgers else incarnations[-1]
    live = [name for name, ledger in ledgers.items() if ledger.job.phase.stage is not Stage.ENDED]
    if not live:
        msg = "no job runs here"
        raise Refused(msg)
    if len(live) > 1:
        msg = f"several jobs run here, name one: {', '.join(live)}"
        raise Refused(msg)
    return live[0]


def unknown(job: str) -> str:
    """Return what to say of a job that is not known."""
    return f"there is no job {job} here"


def shown(ledgers: Mapping[str, Ledger], request: wire.StatusRequest) -> list[str]:
    """Return the jobs asked for, oldest first. Raises `Refused` if there is no such job."""
    if request.job is not None:
        return [choose(ledgers, request.job)]
    ended = [name for name, ledger in ledgers.items() if ledger.job.phase.stage is Stage.ENDED]
    kept = len(ended) if request.ended is None else request.ended
    dropped = set(ended[: max(0, len(ended) - kept)])
    return [name for name in ledgers if name not in dropped]


def event(
    status: wire.JobStatus,
    request: Union[wire.MoveRequest, wire.ReadyRequest, wire.CancelRequest],
) -> Union[MoveRequested, NodeReady, CancelRequested]:
    """Return the event that the request is. Raises `Refused` if it makes no sense for the job."""
    if status.code is not None:
        msg = f"job {status.job} has ended: {status.outcome}"
        raise Refused(msg)
    if isinstance(request, wire.CancelRequest):
        return CancelRequested(job=status.job, reason=request.reason)
    if isinstance(request, wire.ReadyRequest):
        return NodeReady(job=status.job, node=request.node)
    asked = (request.node, *request.more)
    first, *more = [node for node in dict.fromkeys(asked) if node in status.nodes] or [""]
    if not first:
        named = ", ".join(asked)
        where = ", ".join(status.nodes) or "no node yet: `tmover status` shows when it has started"
        msg = f"job {status.job} is not on {named}; it is on {where}"
        raise Refused(msg)
    return MoveRequested(job=status.job, node=first, reason=request.reason, more=tuple(more))


def answer(entry: Entry, actions: Sequence[Action] | None) -> wire.AnyReply:
    """Return what to tell the person: what was decided, as far as `decide` had anything to say."""
    if actions is None:
        return wire.RefusedReply(text=INTERNAL_ERROR)
    text = "; ".join(action.text for action in actions if isinstance(action, Note))
    return wire.Accepted(text=text or _in_short(entry), job=entry.job)


def _in_short(entry: Entry) -> str:
    if isinstance(entry, Submitted):
        return f"job {entry.job} is looked after"
    if isinstance(entry, MoveRequested):
        return f"{', '.join((entry.node, *entry.more))} is to be left"
    if isinstance(entry, NodeReady):
        return f"{entry.node} may be used by job {entry.job}"
    return f"job {entry.job} is to end"
