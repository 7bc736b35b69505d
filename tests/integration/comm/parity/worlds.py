"""Runs all cases in one world, of stock gloo or of ours, in one set of processes."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from integration.comm.harness import Board, Program, join, leave, run
from integration.comm.parity.case import CASES, Failure, plain
from tmover.errors import TmoverError

DEADLINE_S = 100.0
TIMEOUT = timedelta(seconds=30)

Results = dict[str, Any]
"""What each case has returned or raised, by name, on one rank."""


def run_cases(rank: int, size: int) -> Results:
    """Run every case for worlds of this size, one after the other."""
    results: Results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in CASES.items():
            if size in case.sizes:
                results[name] = _outcome(case.body, rank, size)
    return results


def _outcome(body: Callable[[int, int], Any], rank: int, size: int) -> Any:
    try:
        return plain(body(rank, size))
    except Exception as error:  # noqa: BLE001 - what is raised is part of the result
        kinds = tuple(
            kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"
        )
        first = re.sub(r"<\S+ object at 0x\w+>", "<object>", str(error).partition("\n")[0])
        return Failure(kinds, first, isinstance(error, TmoverError))


@functools.cache
def on_gloo(size: int) -> list[Results]:
    """Return what every rank of a world of stock gloo has got."""
    return _in_processes(size, _with_gloo)


@functools.cache
def on_ours(size: int) -> list[Results]:
    """Return what every rank of a world of ours has got."""
    return _in_processes(size, _with_ours)


def _in_processes(size: int, body: Callable[..., Results]) -> list[Results]:
    programs: dict[str, Program] = {
        f"n{rank}": functools.partial(body, rank=rank, size=size) for rank in range(size)
    }
    outcomes = run(programs, deadline_s=DEADLINE_S)
    return [outcomes[f"n{rank}"].value for rank in range(size)]


def _with_gloo(board: Board, rank: int, size: int) -> Results:
    is_host = rank == 0
    port = 0 if is_host else board.get("port")
    store = dist.TCPStore("127.0.0.1", port, size, is_master=is_host, wait_for_workers=False)
    if is_host:
        board.put("port", store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    results = run_cases(rank, size)
    dist.barrier()
    board.put(f"done/{rank}")
    for other in range(size):
        board.get(f"done/{other}")
    return results


def _with_ours(board: Board, rank: int, size: int) -> Results:
    names = [f"n{other}" for other in range(size)]
    fabric = join(board, names[rank], names)
    results = run_cases(rank, size)
    fabric.exchange(b"done")
    leave(fabric)
    return results
