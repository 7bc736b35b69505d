"""Exchange a rank again and again: what it takes a stayer, and what it leaves behind.

One process more than there are ranks. The ranks in `leavers` take turns: the spare process takes
the rank over, and who held it comes back as a new process would, to be the next spare.
"""

from __future__ import annotations

import functools
import gc
import pathlib
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

import progress
from ranks import Holder, Process, join, make_fabric, make_plan, run
from tmover.comm import intercept
from tmover.comm.fabric import Fabric

_ELEMENTS = (10, 500_000)
"""Of what is reduced after every swap: once with everybody, once around the ring."""


class Exchange(NamedTuple):
    """What one swap took one rank of the next world, in seconds."""

    prepare_s: float
    """Beside the running training: what the joiner needs."""
    barrier_s: float
    """Until all ranks stood there: not this rank's own work."""
    commit_s: float
    open_s: float
    """What was opened only once it was needed."""
    cpu_s: float
    """Of the commit and the opening, this thread's: without the time it was not running."""
    first_s: float
    """The first collective after the commit, with what it opened."""
    steady_s: float
    """The same collective once more."""

    @property
    def switch_s(self) -> float:
        """How long the exchange of links kept this rank from training."""
        return self.commit_s + self.open_s


class Footprint(NamedTuple):
    """What a process holds."""

    fds: int
    sockets: int
    threads: int
    rss: int


class Record(NamedTuple):
    """What one process went through."""

    stayed: list[Exchange]
    joined: list[Exchange]
    opened: list[int]
    """Links, by swap in which it stayed."""
    footprints: list[Footprint]
    """Of the process that stays for ever: before each swap, and after the last."""


def measure_switch(world: int, swaps: int) -> list[Record]:
    """Exchange every rank in turn."""
    leavers = list(range(world))
    return run(functools.partial(_swap, world=world, swaps=swaps, leavers=leavers), world + 1)


def measure_leaks(world: int, swaps: int) -> list[Footprint]:
    """Exchange every rank but 0 in turn; return what its process holds before, between, after."""
    leavers = list(range(1, world))
    program = functools.partial(_swap, world=world, swaps=swaps, leavers=leavers)
    stayer: Record = run(program, world + 1)[0]
    return stayer.footprints


def median_of(records: list[Record], name: str) -> float:
    """Return the median of a duration over all swaps and all their stayers."""
    return statistics.median(float(getattr(one, name)) for each in records for one in each.stayed)


# --- in the processes -----------------------------------------------------------------------------


def _swap(process: Process, *, world: int, swaps: int, leavers: list[int]) -> Record:
    """Take part in `swaps` swaps."""
    record = Record([], [], [], [])
    holders = [Holder(number) for number in range(world)]
    spare = Holder(world)
    fabric = _enter(process, world, leavers[0])
    for swap in range(swaps):
        place, epoch = leavers[swap % len(leavers)], swap + 2
        leaver, joiner = holders[place], spare
        holders[place] = joiner
        spare = Holder(leaver.number, leaver.life + 1)
        _look(process, record, swap, swaps)
        if process.number == leaver.number:
            fabric = _leave(process, fabric, epoch)
            fabric = _rehearse(process, spare, leavers[(swap + 1) % len(leavers)], world)
            continue
        before = fabric.links_opened
        taken = _exchange(process, fabric, epoch, holders, joins=process.number == joiner.number)
        if process.number == joiner.number:
            record.joined.append(taken)
        else:
            record.stayed.append(taken)
            record.opened.append(fabric.links_opened - before)
        if process.number == holders[0].number:
            process.store.set(f"over/{epoch}", "")
    _look(process, record, swaps, swaps)
    return record


def _enter(process: Process, world: int, first: int) -> Fabric:
    if process.number == world:
        return _rehearse(process, Holder(world), first, world)
    fabric = join(process, world)
    _reduce()
    return fabric


def _rehearse(process: Process, holder: Holder, rank: int, world: int) -> Fabric:
    """Return the fabric of a standby."""
    fabric = make_fabric(process, holder)
    fabric.rehearse(rank, world)
    intercept.install(fabric)
    dist.init_process_group()
    return fabric


def _leave(process: Process, fabric: Fabric, epoch: int) -> Fabric:
    """Keep the links until every rank has passed into the next world, then end."""
    fabric.exchange(b"")
    process.store.get(f"over/{epoch}")
    intercept.uninstall()
    fabric.close(bye=True)
    return fabric


def _exchange(
    process: Process, fabric: Fabric, epoch: int, holders: list[Holder], *, joins: bool
) -> Exchange:
    plan = make_plan(process, epoch, holders)
    begin = time.perf_counter()
    fabric.prepare(plan, timeout_s=60)
    prepared = time.perf_counter()
    if not joins:
        fabric.exchange(b"")  # the vote in which everybody is ready
    voted = time.perf_counter()
    fabric.barrier(epoch)
    passed, cpu = time.perf_counter(), time.thread_time()
    fabric.commit(epoch)
    committed, cpu = time.perf_counter(), time.thread_time() - cpu
    with _watched(fabric.wiring, "complete") as opening:
        _reduce()
    first = time.perf_counter()
    _reduce()
    steady = time.perf_counter()
    fabric.exchange(b"")  # all ranks have passed
    fabric.release(epoch)
    return Exchange(
        prepare_s=prepared - begin,
        barrier_s=passed - voted,
        commit_s=committed - passed,
        open_s=opening.wall_s,
        cpu_s=cpu + opening.cpu_s,
        first_s=first - committed,
        steady_s=steady - first,
    )


def _reduce() -> None:
    for count in _ELEMENTS:
        dist.all_reduce(torch.ones(count))


class _Stopwatch:
    """Adds up how long a function runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.wall_s = self.cpu_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.thread_time() - cpu


@contextmanager
def _watched(thing: Any, method: str) -> Iterator[_Stopwatch]:
    """Measure how long a method of a thing runs."""
    stopwatch = _Stopwatch(getattr(thing, method))
    setattr(thing, method, stopwatch)
    yield stopwatch
    delattr(thing, method)


def _look(process: Process, record: Record, swap: int, swaps: int) -> None:
    """Note what this process holds, if it is the one that is looked at."""
    if process.number != 0:
        return
    gc.collect()  # what nobody holds any more is no leak, whenever it would be collected
    record.footprints.append(footprint())
    progress.show(swap, swaps, "swap")


def footprint() -> Footprint:
    """Return what this process holds now."""
    proc = pathlib.Path("/proc/self")
    targets = [_target(fd) for fd in (proc / "fd").iterdir()]
    pages = int((proc / "statm").read_text().split()[1])
    return Footprint(
        fds=len(targets),
        sockets=sum(target.startswith("socket:") for target in targets),
        threads=sum(1 for _ in (proc / "task").iterdir()),
        rss=pages * resource.getpagesize(),
    )


def _target(fd: pathlib.Path) -> str:
    try:
        return str(fd.readlink())
    except FileNotFoundError:  # the one the directory was read through
        return ""
