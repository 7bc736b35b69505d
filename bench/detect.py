"""Measure how long it takes until all survivors know that one is gone: `python bench/detect.py`.

`kill`: a worker is killed; its links break. `hang`: a worker is stopped (SIGSTOP); its kernel goes
on answering, its agent sees it. Both in a job with agents and a controller, on this machine.
`cut`: the cable of a machine is pulled, which nobody is told of; the machines are network
namespaces, so it takes root. Each is the time from the event to the last survivor's revocation.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from integration.comm.harness import Board, join, run
from support.eventually import eventually
from support.machines import Machines, cannot_make
from support.training import SCRIPT, read_trace
from tmover.cluster import JobSpec, LocalCluster, agent_argv
from tmover.comm.fabric import Fabric
from tmover.comm.timeouts import Timeouts
from tmover.config import load
from tmover.errors import Interrupted, LinkError
from tmover.process import send_signal
from tmover.scheduler.inhabitants import find_worker

NODES = 3
GONE = 1
PATIENCE_S = 120.0


def measure() -> dict[str, float]:
    """Return the seconds of each case; `cut` is missing where there can be no machines."""
    found = {"kill": kill(), "hang": hang()}
    if not cannot_make():
        found["cut"] = cut()
    return found


def kill() -> float:
    """Return how long it takes to notice a worker that is killed."""
    return _in_a_job(signal.SIGKILL)


def hang() -> float:
    """Return how long it takes to notice a worker that is stopped."""
    return _in_a_job(signal.SIGSTOP)


def _in_a_job(number: signal.Signals) -> float:
    """Send a signal to one worker of a job that trains."""
    with tempfile.TemporaryDirectory() as folder, LocalCluster(pathlib.Path(folder), load()) as own:
        trace = own.state / "trace"
        argv = agent_argv(str(SCRIPT), "--steps", "1000000")
        env = {**os.environ, "TMOVER_TRACE": str(trace), "OMP_NUM_THREADS": "1"}
        spec = JobSpec(nodes=NODES, standby=1, nproc=1, argv=argv, env=env, cwd=own.state)
        job = own.submit(spec)
        own.wait(
            job,
            lambda status: (
                (status.step or 0) > 10 and any(one.state == "warm" for one in status.standbys)
            ),
            timeout_s=PATIENCE_S,
        )
        holder = own.scheduler.holder(own.status(job).slots[GONE].node)
        assert holder is not None
        began = time.monotonic()
        send_signal(find_worker(holder, 0), number)
        last = eventually(lambda: _last_revoked(trace), timeout_s=PATIENCE_S)
        assert last is not None
        return last - began


def _last_revoked(trace: pathlib.Path) -> float | None:
    """Return when the last survivor knew of it, once all do."""
    first: dict[int, float] = {}
    for line in read_trace(trace):
        if line["event"] == "revoked" and line["rank"] != GONE:
            first.setdefault(line["rank"], float(line["t"]))
    return max(first.values()) if len(first) == NODES - 1 else None


def cut() -> float:
    """Return how long it takes to notice a machine whose cable is pulled."""
    names = [f"n{rank}" for rank in range(NODES)]
    with Machines(NODES) as machines:

        def rank_of(rank: int) -> Callable[[Board], float]:
            def body(board: Board) -> float:
                machines.enter(rank)
                timeouts = dataclasses.replace(Timeouts(), collective_s=PATIENCE_S)
                address = machines.addresses[rank]
                fabric = join(board, names[rank], names, address=address, timeouts=timeouts)
                board.put(f"in/{rank}")
                known = _exchange_to_the_end(fabric)
                board.put(f"over/{rank}")
                for other in range(NODES):
                    board.get(f"over/{other}")
                return known

            return body

        def pull(board: Board) -> float:
            for rank in range(NODES):
                board.get(f"in/{rank}")
            time.sleep(2)  # in the middle of the exchanges
            began = time.monotonic()
            machines.cut(GONE)
            return began

        programs: dict[str, Any] = {name: rank_of(rank) for rank, name in enumerate(names)}
        outcomes = run({**programs, "pull": pull})
    last = max(float(outcomes[name].value) for rank, name in enumerate(names) if rank != GONE)
    return last - float(outcomes["pull"].value)


def _exchange_to_the_end(fabric: Fabric) -> float:
    try:
        while True:
            fabric.exchange(b"good")
    except (Interrupted, LinkError):
        return time.monotonic()


if __name__ == "__main__":
    print(json.dumps({name: round(seconds, 3) for name, seconds in measure().items()}))
