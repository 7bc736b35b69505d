"""Where ranks hold what no other does: which copies there are, and to which of them all return.

A *generation* is what a rank holds after one step, kept in host memory by itself and by its
keepers: the same rank of the next nodes, so many of them as may be lost at once. What a lost rank
had after that cannot be had any more, so all ranks return to the newest generation that there still
is of every rank, and do the steps since then again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tmover.core.events import Reported
from tmover.errors import ConfigError


def keepers(rank: int, *, nodes: int, nproc: int, world_size: int) -> tuple[int, ...]:
    """Return who keeps a rank's copies: the rank in the same place of each of the next `nodes`.

    >>> keepers(4, nodes=2, nproc=2, world_size=8), keepers(4, nodes=1, nproc=2, world_size=8)
    ((6, 0), (6,))
    """
    return tuple((rank + ahead * nproc) % world_size for ahead in range(1, nodes + 1))


def wards(rank: int, *, nodes: int, nproc: int, world_size: int) -> tuple[int, ...]:
    """Return whose copies a rank keeps: those of whom it is a keeper.

    >>> wards(4, nodes=2, nproc=2, world_size=8)
    (2, 0)
    """
    return tuple((rank - back * nproc) % world_size for back in range(1, nodes + 1))


def with_room(nodes: int, *, nnodes: int, strict: bool) -> int:
    """Return on how many other nodes copies are kept, if they are to be on so many.

    Raises `ConfigError` if a job has not as many, or takes what there is if it is not `strict`.
    """
    if nnodes <= nodes and strict:
        msg = (
            f"[worker] copies = {nodes}: a job on {nnodes} nodes has {nnodes - 1} other to keep a "
            f"rank's copies: set TMOVER_WORKER_COPIES to {nnodes - 1} at most, or take "
            f"{nodes + 1} nodes"
        )
        raise ConfigError(msg)
    return min(nodes, nnodes - 1)


def newest(held: Sequence[Iterable[int]]) -> int | None:
    """Return the newest generation that is held of every rank, None if there is none.

    >>> newest([(3, 4), (3, 4), (3,)]), newest([(3,), (4,)])
    (3, None)
    """
    common = set.intersection(*map(set, held)) if held else set[int]()
    return max(common, default=None)


def held_of(rank: int, own: Reported | None, reports: Iterable[Reported]) -> set[int]:
    """Return the generations of a rank that its own worker holds or another one keeps."""
    mine = set(own.own) if own is not None else set[int]()
    return mine.union(*(report.kept.get(rank, ()) for report in reports))


def sources(step: int, ranks: Mapping[int, str], reports: Mapping[str, Reported]) -> dict[str, str]:
    """Return who sends the generation of `step` to each worker that does not hold its own.

    `ranks` are the workers that will hold them; all of what is missing is kept by somebody.
    """
    found: dict[str, str] = {}
    for rank, worker in ranks.items():
        own = reports.get(worker)
        if own is None or step not in own.own:
            keepers = (name for name, said in reports.items() if step in said.kept.get(rank, ()))
            found[worker] = next(keepers)
    return found
