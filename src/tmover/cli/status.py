"""`tmover status`: how jobs are."""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from tmover.cli import incidents
from tmover.cli.state import state_option
from tmover.cli.text import Text, plain

if TYPE_CHECKING:
    from tmover.errors import ControllerUnavailable
    from tmover.wire import JobStatus, MoveStatus, StandbyStatus, StatusReply, StatusRequest

_ENDED = 3
"""So many of the jobs that have ended are shown unless all are asked for."""
_PLACING = {
    "state": "placed by the state it has of its own",
    "replay": "fast-forwarded: all before its position is fetched again, and dropped",
}
"""What is worth saying of a joiner's loader; where samples have numbers, it goes straight there."""


@click.command(name="status")
@click.argument("job", type=Text(), required=False)
@click.option("-a", "--all", "show_all", is_flag=True, help="All jobs that have ended, too.")
@click.option("--json", "as_json", is_flag=True, help="A JSON list of jobs.")
@state_option
def command(*, job: str | None, show_all: bool, as_json: bool, state: pathlib.Path | None) -> None:
    """Show how JOB is, or all jobs: its nodes and standbys, how far they are, what was decided.

    Of the jobs that have ended, the last three are shown.

    Without a controller it is what its journal says, if you may read that, and exits with 4; how
    old that is, is said, and stands in `as_of` of the JSON.

    Steps are the last ones applied; HEARD is the time since the node was last heard of. The slot of
    a standby, in brackets, is the one it rehearses or has rehearsed last.
    """
    import msgspec

    from tmover import wire
    from tmover.config import load, state_directory
    from tmover.controller.client import ask
    from tmover.errors import ControllerUnavailable

    request = wire.StatusRequest(job=job, ended=None if show_all else _ENDED)
    directory = state_directory(state)
    try:
        answer, is_old = ask(directory, request, load().controller.request_s), False
    except ControllerUnavailable as error:
        answer, is_old = _journaled(directory, request, error), True
    if not isinstance(answer, wire.StatusReply):
        return
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(answer.jobs), indent=2).decode())
    elif not answer.jobs:
        click.echo("no jobs")
    else:
        click.echo("\n\n".join(render(one) for one in answer.jobs))
    if answer.scheduler and answer.jobs and not as_json:
        click.echo(f"\n{plain(answer.scheduler)}")
    if answer.more and not as_json:
        click.echo(f"\n{answer.more} more have ended: `tmover status --all` shows them")
    if is_old:
        sys.exit(ControllerUnavailable.exit_code)


def _journaled(
    state: pathlib.Path, request: StatusRequest, error: ControllerUnavailable
) -> StatusReply:
    """Return what the journals say, and say that it is that. Raises `error` if there are none."""
    from tmover.controller.archive import Archive

    if not Archive.is_there(state):
        raise error
    reply, wrong = Archive(state).reply(request)
    for damage in wrong:
        click.secho(plain(str(damage)), err=True, fg="red")
    if not reply.jobs:
        raise error
    heard = time.time() - max(job.as_of or 0.0 for job in reply.jobs)
    said = f"{error}. This is what the journal says, {_age(heard)} old"
    click.secho(plain(said), err=True, fg="yellow")
    return reply


def _age(seconds: float) -> str:
    """Return a time in one unit.

    >>> _age(59), _age(3600), _age(200000)
    ('59 s', '60 min', '2 days')
    """
    if seconds < 120:
        return f"{max(0, seconds):.0f} s"
    return (
        f"{seconds / 60:.0f} min"
        if seconds < 2 * 3600
        else (f"{seconds / 3600:.0f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days")
    )


def render(status: JobStatus) -> str:
    """Return the job's status as a plain table."""
    end = "" if status.code is None else f", exit code {status.code}: {status.outcome}"
    head = (
        f"JOB {status.job}  {status.phase}{end}  step {_step(status.step)}  epoch {status.epoch}  "
        f"ranks {status.world_size}  owner {status.owner}"
    )
    lines = [head, *_as_of(status), "", *_table(_rows(status))]
    if status.move is not None:
        move = status.move
        lines += ["", f"move: {move.phase}{_move(move)}"]
    if status.redundancy and status.code is None:
        lines += ["", f"a lost rank's state: {_source(status)}"]
    if status.placing in _PLACING and status.code is None:
        lines += ["", f"a joiner's loader: {_PLACING[status.placing]}"]
    lines += _readiness(status)
    for standby in status.standbys:
        if standby.warmth is not None:
            lines += ["", f"standby {standby.node}: {_warmth(standby)}"]
        if standby.recorded:
            lines += ["", f"standby {standby.node} rehearsed with {standby.recorded}"]
    if status.pool and status.code is None:
        jobs = ", ".join(status.pool_jobs) or "none yet"
        lines += ["", f"pool {status.pool}: standbys are shared with other jobs: {jobs}"]
    lines += _troubles(status)
    lines += incidents.lines(status)
    if status.allocations:
        lines += ["", *(f"  {held}" for held in status.allocations)]
    if status.notes:
        lines += ["", *(f"  {note}" for note in status.notes)]
    return "\n".join(map(plain, lines))


def _as_of(status: JobStatus) -> Iterator[str]:
    """Yield when this was so, if no controller has said it."""
    if status.as_of is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.as_of))
        yield f"as of {at}, by the journal"


def _source(status: JobStatus) -> str:
    """Return where the state of a rank comes from whose node is lost."""
    if status.redundancy == "replicas":
        return "each rank has a replica on another node"
    where = "another node" if status.copies == 1 else f"{status.copies} other nodes"
    return f"copies on {where}, to which all return"


def _readiness(status: JobStatus) -> Iterator[str]:
    """Yield which slots each warm standby can take, and at what price."""
    for standby in status.standbys:
        if standby.state != "warm" or not status.slots:
            continue
        other = [slot.slot for slot in status.slots if slot.slot not in standby.takes]
        said = f"standby {standby.node}: takes {_slots(standby.takes)} as it is"
        if other:
            said += f", {_slots(other)} after a rehearsal"
        yield from ("", said + (f": {standby.rebuilds}" if other and standby.rebuilds else ""))


def _warmth(standby: StandbyStatus) -> str:
    """Return what of a standby is warm, and since when that is known."""
    warm, ago = standby.warmth, _ago(standby.warm_s)
    assert warm is not None  # noqa: S101 - the caller has looked
    parts = [f"a shadow step in {warm.step_s * 1000:.3g} ms", f"{warm.modules} modules imported"]
    parts.append(f"{warm.state_bytes / 2**20:.1f} MiB of state")
    parts += [f"{warm.graphs} compiled graphs"] if warm.graphs else []
    parts += [f"{warm.loaders} loader workers"] if warm.loaders else []
    parts += [f"{warm.links} connections on its node"] if warm.links else []
    again = f", proven again {warm.proofs} times" if warm.proofs else ""
    return f"{', '.join(parts)}; seen {ago} ago{again}"


def _slots(slots: Sequence[int]) -> str:
    """Return numbers of slots in a few words.

    >>> _slots([0, 1, 2, 5]), _slots([3]), _slots([])
    ('slots 0-2, 5', 'slot 3', 'no slot')
    """
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][-1] == slot - 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    named = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
    return f"slot{'s' * (len(slots) > 1)} {named}" if slots else "no slot"


def _troubles(status: JobStatus) -> Iterator[str]:
    """Yield who keeps the others waiting, and whether the job stands still."""
    if status.suspect:
        yield from ("", f"suspect: {status.suspect}")
    if status.slow:
        yield from ("", f"slow: {status.slow}")
    for wait in status.waits:
        if wait.is_straggler:
            per = f"{wait.per_step_s:.3g} s per step in the last {wait.steps}"
            yield from ("", f"straggler: rank {wait.rank} on {wait.node}, others wait {per}")


def _move(move: MoveStatus) -> str:
    if not move.epoch:
        return f", {move.leaver} is to be left"
    return f" in epoch {move.epoch}, {move.leaver or '?'} to {move.joiner or '?'}"


def _rows(status: JobStatus) -> Iterator[tuple[str, ...]]:
    yield ("SLOT", "NODE", "STATE", "STEP", "HEARD", "AGENT")
    for slot in status.slots:
        step = _step(slot.step)
        yield (str(slot.slot), slot.node or "-", slot.state, step, _ago(slot.heard_s), slot.agent)
    for standby in status.standbys:
        row = (f"({standby.slot})", standby.node, standby.state, "-")
        yield (*row, _ago(standby.heard_s), standby.agent)


def _table(rows: Iterator[tuple[str, ...]]) -> list[str]:
    """Return the rows with their columns aligned."""
    table: Sequence[tuple[str, ...]] = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table
    ]


def _step(step: int | None) -> str:
    return "-" if step is None or step < 0 else str(step)


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}s"
