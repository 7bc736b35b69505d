"""What Slurm's commands are given and what they print: pure, and the same from 22.05 to 26.05.

A job's name and comment hold what its user likes, newlines and separators included, and nobody may
write another job's line in them: `squeue` and `sinfo` print a `mark` after each field that nobody
could know, since it is made anew for each call. What does not add up is a `SchedulerError`: a table
of which a part is left out would read as "these jobs are gone".
"""

from __future__ import annotations

import contextlib
import datetime
import re
import secrets
from collections.abc import Collection, Iterator, Sequence

import msgspec

from tmover.errors import ConfigError, SchedulerError
from tmover.scheduler import hostlist
from tmover.scheduler.interface import NodeState
from tmover.scheduler.slurm.states import JobState, node_state

JOB_FIELDS = (
    "JobID",
    "JobArrayID",
    "UserName",
    "State",
    "NodeList",
    "BatchHost",
    "RestartCnt",
    "NumNodes",
    "Reason",
    "EndTime",
    "Partition",
    "Name",
    "Comment",
)
NODE_FIELDS = ("NodeList", "NodeAddr", "StateComplete", "Reason")

_NOTHING = frozenset({"", "(null)", "N/A", "n/a", "None", "NONE", "none", "Unknown"})
_RESERVATION_KEY = re.compile(
    r"(?:^| )(ReservationName|StartTime|EndTime|Duration|Nodes|NodeCnt|CoreCnt|Features"
    r"|PartitionName|Flags|TRES|Users|Groups|Accounts|Licenses|State|BurstBuffer|Watts"
    r"|MaxStartDelay|Comment|Qos)="
)
_PING = re.compile(r"^Slurmctld\(.*\) at .* is UP\s*$", re.MULTILINE)
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SUBMITTED = re.compile(r"^([0-9]+)(?:;\S*)?$", re.MULTILINE)
_COUNT = re.compile(r"[0-9]+")


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job, or one element of a job array."""

    id: str
    """Its own job id. Elements of an array that still wait share that of the array."""
    array_id: str
    """`8_3` for element 3 of array 8, else the job id: no two jobs have the same."""
    name: str
    user: str
    state: JobState
    nodes: tuple[str, ...] = ()
    """Those it holds, or held when it ended."""
    batch_host: str = ""
    """Where its batch script runs, "" if it has none."""
    restarts: int = 0
    num_nodes: int = 0
    """How many it has, or waits for."""
    reason: str = ""
    """Why it waits, or why it ended."""
    end_time: float | None = None
    """When it ended or will reach its time limit, in seconds since 1970."""
    partition: str = ""
    comment: str = ""


class NodeDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A node, and who said what about it."""

    name: str
    address: str
    state: NodeState
    slurm_state: str
    """As Slurm prints it: `allocated+drain`."""
    reason: str = ""


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation, of the past, the present or the future."""

    name: str
    start: float
    end: float
    nodes: tuple[str, ...]
    flags: frozenset[str]
    users: tuple[str, ...]
    state: str
    """`ACTIVE` or `INACTIVE`."""


def new_mark() -> str:
    """Return a mark for one call. It ends with no digit and holds no comma."""
    return f"|#{secrets.token_hex(12)}#"


def squeue_argv(mark: str, users: Collection[str] | None = None) -> list[str]:
    """Return how to ask for all jobs of `users`, None for everybody, the ended ones included."""
    whose = [] if users is None else ["-u", ",".join(sorted(users))]
    return ["squeue", "-h", "-a", "-r", "-t", "all", *whose, "-O", _format(JOB_FIELDS, mark)]


def parse_squeue(text: str, mark: str) -> list[JobInfo]:
    """Return the jobs. Raises `SchedulerError` if a line cannot be read.

    >>> m = "|#"
    >>> line = m.join(["7", "7", "ann", "RUNNING", "n[1-2]", "n1", "0", "2", "None", "9", "main"])
    >>> job, = parse_squeue(f"{line}{m}a|b{m}(null){m}" + chr(10), m)
    >>> job.name, job.nodes, job.state.is_running
    ('a|b', ('n1', 'n2'), True)
    """
    return [_job(*row) for row in _rows(text, mark, len(JOB_FIELDS), "squeue")]


def sinfo_argv(mark: str) -> list[str]:
    """Return how to ask for all nodes of all partitions."""
    return ["sinfo", "-h", "-a", "-N", "-O", _format(NODE_FIELDS, mark)]


def parse_sinfo(text: str, mark: str) -> list[NodeDetail]:
    """Return the nodes, each once. Raises `SchedulerError` if a line cannot be read."""
    nodes: dict[str, NodeDetail] = {}
    for name, address, state, reason in _rows(text, mark, len(NODE_FIELDS), "sinfo"):
        nodes[name] = NodeDetail(
            name=name,
            address=address,
            state=node_state(state),
            slurm_state=state,
            reason=_value(reason),
        )
    return sorted(nodes.values(), key=lambda node: hostlist.natural(node.name))


def reservations_argv() -> list[str]:
    """Return how to ask for the reservations."""
    return ["scontrol", "-o", "show", "res"]


def parse_reservations(text: str) -> list[Reservation]:
    """Return the reservations that have a name and both times; only administrators make any.

    A line that has not is left out: it is part of another one's name or comment.
    """
    return [found for line in text.splitlines() for found in _reservation(line)]


def ping_argv() -> list[str]:
    """Return how to ask whether slurmctld, or its backup, is there."""
    return ["scontrol", "ping"]


def parse_ping(text: str) -> bool:
    """Return whether any slurmctld is up."""
    return _PING.search(text) is not None


def sbatch_argv(options: Sequence[str], script: str, args: Sequence[str] = ()) -> list[str]:
    """Return how to submit `script`, which is given `args`."""
    return ["sbatch", "--parsable", *options, "--", script, *args]


def parse_sbatch(text: str) -> str:
    """Return the id of the job that `sbatch --parsable` reports. Raises `SchedulerError`."""
    return _only(_SUBMITTED.search(text), f"sbatch printed no job id: {text[:200]!r}")


def salloc_argv(options: Sequence[str]) -> list[str]:
    """Return how to allocate nodes that no process holds."""
    return ["salloc", "--no-shell", *options]


def scancel_argv(ids: Sequence[str], *, signal: str | None = None) -> list[str]:
    """Return how to cancel jobs, or to signal all their job steps."""
    for each in ids:
        if not _JOB_ID.fullmatch(each):
            msg = f"{each!r} is no job id"
            raise ConfigError(msg)
    return ["scancel", *([] if signal is None else [f"--signal={signal}"]), *ids]


def shrink_argv(job: str, keep: Sequence[str]) -> list[str]:
    """Return how to have `job` keep only these nodes."""
    if not keep or not _JOB_ID.fullmatch(job):
        msg = f"job {job!r} cannot be cut down to {len(keep)} nodes"
        raise ConfigError(msg)
    return ["scontrol", "update", f"JobId={job}", f"NodeList={','.join(map(_checked, keep))}"]


def comment_argv(job: str, comment: str) -> list[str]:
    """Return how to replace the comment of `job`."""
    if not _JOB_ID.fullmatch(job):
        msg = f"{job!r} is no job of Slurm"
        raise ConfigError(msg)
    return ["scontrol", "update", f"JobId={job}", f"Comment={comment}"]


def drain_argv(node: str, reason: str) -> list[str]:
    """Return how to drain `node`. Slurm wants a reason; control characters become spaces."""
    plain = re.sub(r"[\x00-\x1f\x7f]+", " ", reason).strip() or "drained by tmover"
    return ["scontrol", "update", f"NodeName={_checked(node)}", "State=DRAIN", f"Reason={plain}"]


def resume_argv(node: str) -> list[str]:
    """Return how to take `node` back into service."""
    return ["scontrol", "update", f"NodeName={_checked(node)}", "State=RESUME"]


def _format(fields: Sequence[str], mark: str) -> str:
    return ",".join(f"{field}:{mark}" for field in fields)


def _rows(text: str, mark: str, width: int, command: str) -> Iterator[list[str]]:
    """Yield the fields of each line, whatever is in them."""
    *values, rest = text.split(mark)
    if len(values) % width or rest.strip("\n"):
        msg = f"cannot read what {command} printed, {text[:200]!r}: is Slurm older than 22.05?"
        raise SchedulerError(msg)
    for start in range(0, len(values), width):
        first, *others = values[start : start + width]
        yield [first.removeprefix("\n"), *others]


def _job(
    job: str,
    array_id: str,
    user: str,
    state: str,
    nodes: str,
    host: str,
    restarts: str,
    num_nodes: str,
    reason: str,
    end: str,
    partition: str,
    name: str,
    comment: str,
) -> JobInfo:
    return JobInfo(
        id=job,
        array_id=_value(array_id) or job,
        name=name,
        user=user,
        state=JobState.parse(state),
        nodes=_expand(nodes),
        batch_host="" if host == "localhost" else _value(host),
        restarts=_count(restarts),
        num_nodes=_count(num_nodes),
        reason=_value(reason),
        end_time=_time(end),
        partition=partition,
        comment="" if comment == "(null)" else comment,
    )


def _count(text: str) -> int:
    """Return the number that a text begins with: `2-2` nodes are two. 0 if there is none."""
    found = _COUNT.match(text)
    return 0 if found is None else int(found[0])


def _reservation(line: str) -> Iterator[Reservation]:
    keys = list(_RESERVATION_KEY.finditer(line))
    ends = [*(match.start() for match in keys), len(line)][1:]
    found: dict[str, str] = {}
    for match, end in zip(keys, ends, strict=True):
        found.setdefault(match[1], line[match.end() : end].rstrip())
    start, end_time = _time(found.get("StartTime", "")), _time(found.get("EndTime", ""))
    name = found.get("ReservationName", "")
    if not name or start is None or end_time is None:
        return
    yield Reservation(
        name=name,
        start=start,
        end=end_time,
        nodes=_expand(found.get("Nodes", "")),
        flags=frozenset(filter(None, _value(found.get("Flags", "")).split(","))),
        users=tuple(filter(None, _value(found.get("Users", "")).split(","))),
        state=found.get("State", ""),
    )


def _value(text: str) -> str:
    """Return `text`, "" if it is one of Slurm's words for nothing."""
    return "" if text in _NOTHING else text


def _expand(text: str) -> tuple[str, ...]:
    """Return the names of a hostlist. Raises `SchedulerError`."""
    try:
        return tuple(hostlist.expand(_value(text)))
    except ConfigError as error:
        msg = f"cannot read the nodes that Slurm names: {error}"
        raise SchedulerError(msg) from error


def _time(text: str) -> float | None:
    """Return seconds since 1970 of a time, printed as such or (local) as 2026-01-31T12:00:00."""
    if text.isascii() and text.isdigit():
        return float(text)
    with contextlib.suppress(ValueError, OverflowError):
        return datetime.datetime.fromisoformat(text).timestamp()
    return None


def _only(match: re.Match[str] | None, otherwise: str) -> str:
    if match is None:
        raise SchedulerError(otherwise)
    return match[1]


def _checked(node: str) -> str:
    """Return the name of one node, which is neither a hostlist nor an option."""
    if not _NODE.fullmatch(node):
        msg = f"{node!r} is no node's name"
        raise ConfigError(msg)
    return node
