"""Measure the communicator beside gloo, in one run: `python bench/comm.py`.

Both move the same tensors between the same processes, in turns; only the ratios mean anything on a
machine with fewer cores than ranks. Then one rank is exchanged, and its parts are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

from tmover.comm import intercept
from tmover.comm.fabric import Fabric
from tmover.core.events import Member, Plan

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
SECRET = os.urandom(32)
TURNS = 5

Report = dict[str, Any]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=pathlib.Path, help="also write the numbers to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for size in arguments.worlds:
        found[f"all_reduce, {size} ranks"] = _run(size, _race, size)
        found[f"exchange of a rank, {size} ranks"] = _run(size + 1, _swap, size)
    for title, report in found.items():
        print(f"\n{title}")
        for line in report.values():
            print("  " + "  ".join(f"{key} {value}" for key, value in line.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def _run(count: int, program: Callable[[dist.Store, int, int], Report], size: int) -> Report:
    """Run `program(store, number, size)` in forked processes; return what the first one returns."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for number in range(count):
            pid = os.fork()
            if pid == 0:
                _become(folder, count, number, program, size)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise SystemExit(1)
        report: Report = json.loads((pathlib.Path(folder) / "report.json").read_text())
        return report


def _become(
    folder: str,
    count: int,
    number: int,
    program: Callable[[dist.Store, int, int], Report],
    size: int,
) -> None:
    code = 1
    try:
        store = dist.FileStore(f"{folder}/store", count)
        report = program(store, number, size)
        if number == 0:
            (pathlib.Path(folder) / "report.json").write_text(json.dumps(report))
        code = 0
    except BaseException:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


# --- processes ------------------------------------------------------------------------------------


def _fabric(store: Any, number: int) -> Fabric:
    fabric = Fabric(job="bench", secret=SECRET, uid=f"n{number}/0", address="127.0.0.1")
    store.set(f"endpoint/{number}", fabric.endpoint)
    return fabric


def _plan(store: Any, epoch: int, numbers: list[int]) -> Plan:
    return Plan(
        epoch=epoch,
        members=tuple(
            Member(
                rank=rank,
                worker=f"n{number}/0",
                node=f"n{number}",
                endpoint=store.get(f"endpoint/{number}").decode(),
            )
            for rank, number in enumerate(numbers)
        ),
    )


def _race(store: Any, number: int, size: int) -> Report:
    fabric = _fabric(store, number)
    fabric.form(_plan(store, 1, list(range(size))), timeout_s=30)
    intercept.install(fabric)
    dist.init_process_group()
    ours: Any = dist.group.WORLD
    prefix = dist.PrefixStore("gloo", store)
    gloo = ProcessGroupGloo(prefix, number, size, timedelta(seconds=60))
    report = {}
    for bytes_ in SIZES:
        tensor = torch.ones(bytes_ // 4)
        runs = {
            "tmover": lambda t=tensor: ours.allreduce([t]).wait(),
            "inline": lambda t=tensor: dist.all_reduce(t),
            "gloo": lambda t=tensor: gloo.allreduce([t]).wait(),
        }
        turns = max(2, min(200, (32 << 20) // bytes_))
        times = _in_turns(runs, turns, settle=lambda: fabric.exchange(b""))
        report[str(bytes_)] = {
            "bytes": bytes_,
            **{f"{name}_us": round(value * 1e6, 1) for name, value in times.items()},
            "gloo/tmover": round(times["gloo"] / times["tmover"], 2),
            "gloo/inline": round(times["gloo"] / times["inline"], 2),
        }
    votes = _in_turns({"vote": lambda: fabric.exchange(b"x" * 40)}, 200, settle=lambda: None)
    report["vote"] = {"vote_us": round(votes["vote"] * 1e6, 1)}
    fabric.exchange(b"done")
    intercept.uninstall()
    fabric.close(bye=True)
    return report


def _in_turns(
    runs: dict[str, Callable[[], Any]], count: int, *, settle: Callable[[], Any]
) -> dict[str, float]:
    """Return the median time of each, measured in blocks that take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(TURNS):
        for name, run in runs.items():
            settle()
            begin = time.perf_counter()
            for _ in range(count):
                run()
            times[name].append((time.perf_counter() - begin) / count)
    return {name: statistics.median(values) for name, values in times.items()}


def _swap(store: Any, number: int, size: int) -> Report:
    """Exchange rank 1, again and again, between two processes that take turns as its holder."""
    fabric = _fabric(store, number)
    old, new = list(range(size)), [0, size, *range(2, size)]
    if number != size:
        fabric.form(_plan(store, 1, old), timeout_s=30)
    else:
        fabric.rehearse(1, size)
    intercept.install(fabric)
    dist.init_process_group()
    report: Report = {}
    if number in new:
        plan = _plan(store, 2, new)
        times = [time.perf_counter()]
        fabric.prepare(plan, timeout_s=30)
        times.append(time.perf_counter())
        fabric.barrier(2)
        times.append(time.perf_counter())
        fabric.commit(2)
        times.append(time.perf_counter())
        dist.all_reduce(torch.ones(10))
        times.append(time.perf_counter())
        names = ("prepare_us", "barrier_us", "commit_us", "first_all_reduce_us")
        steps = zip(names, times, times[1:], strict=False)
        report["once"] = {name: round((b - a) * 1e6, 1) for name, a, b in steps}
        fabric.exchange(b"done")
    store.add("done", 1)
    while number not in new and int(store.add("done", 0)) < size:
        time.sleep(0.01)
    intercept.uninstall()
    fabric.close(bye=True)
    return report


if __name__ == "__main__":
    main()
