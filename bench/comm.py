"""Measure the communicator beside gloo, in one run: `make bench-comm`, or `python bench/comm.py`.

Only ratios mean anything on a machine with fewer cores than ranks; both sides of each are measured
in turns, between the same processes. bench/README.md says how, and what came out last.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

import torch

import ranks
import steps
import swaps
import throughput

Report = dict[str, Any]
OUT = pathlib.Path(__file__).parent / "out" / "comm.json"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_US, _MS, _MIB = 1e6, 1e3, 1 << 20


class Extent(NamedTuple):
    """How much is measured."""

    worlds: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = throughput.SIZES
    rounds: int = throughput.ROUNDS
    switched: tuple[int, ...] = (4, 8, 16)
    switches: int = 32
    """At least; every rank leaves equally often."""
    warm_up: int = 20
    """Swaps before anything is compared with what was before them."""
    swaps: int = 200
    step_rounds: dict[str, int] = steps.ROUNDS
    steps: dict[str, int] = steps.STEPS
    model: str | None = None
    """What is trained in place of each model; None for itself."""


QUICK = Extent(
    worlds=(2,),
    sizes=(4 << 10, 1 << 20),
    rounds=1,
    switched=(4,),
    switches=4,
    warm_up=1,
    swaps=2,
    step_rounds={"demo": 1},
    steps={"demo": 2},
    model="tiny",
)


def main() -> None:
    """Measure what is asked for, print tables, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help=f"parts, by commas: {','.join(PARTS)}")
    parser.add_argument("--json", type=pathlib.Path, default=OUT, help="where the figures go")
    parser.add_argument("--tcp", action="store_true", help="no Unix sockets; not in `steps`")
    parser.add_argument("--quick", action="store_true", help="see that it works; figures are void")
    args = parser.parse_args()
    parts = args.only.split(",") if args.only else list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for number in _ENDING:
        signal.signal(number, _end)
    torch.set_num_threads(1)
    if args.tcp:
        ranks.speak_tcp()
    report: Report = {"machine": _machine(), "torch": torch.__version__}
    report |= {"quick": args.quick, "tcp": args.tcp}
    for part in parts:
        report |= PARTS[part](QUICK if args.quick else Extent())
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {args.json}")


def _end(number: int, frame: FrameType | None) -> None:
    """End everything on the way out; a second Ctrl-C does not stop that."""
    del frame
    for one in _ENDING:
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _machine() -> dict[str, Any]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


# --- the parts ------------------------------------------------------------------------------------


def _throughput(extent: Extent) -> Report:
    points, votes = throughput.measure(extent.worlds, extent.sizes, extent.rounds)
    worst = min(points, key=lambda point: point.ratio)
    means = {
        str(world): statistics.geometric_mean(p.ratio for p in points if p.world == world)
        for world in extent.worlds
    }
    overall = statistics.geometric_mean(point.ratio for point in points)
    below = sum(point.ratio < 0.95 for point in points)
    print(
        f"\ngeometric mean {overall:.2f} ({_listed(means)}); {below} of {len(points)} points below "
        f"0.95, the worst {worst.ratio:.2f}: {worst.op} of {worst.bytes} bytes, {worst.world} ranks"
    )
    _table(
        "eight bytes to everybody",
        ("ranks", "vote, µs", "gloo, µs"),
        [(each.world, each.vote_us, each.gloo_us) for each in votes],
    )
    return {
        "throughput": [
            {
                "op": point.op,
                "bytes": point.bytes,
                "world": point.world,
                "ratio_to_gloo": point.ratio,
                "tmover_s": point.tmover_s,
                "gloo_s": point.gloo_s,
            }
            for point in points
        ],
        "geometric_mean": {"all": overall, **means},
        "worst": {"op": worst.op, "bytes": worst.bytes, "world": worst.world, "ratio": worst.ratio},
        "vote_us": {str(v.world): {"vote": v.vote_us, "gloo": v.gloo_us} for v in votes},
    }


def _steps(extent: Extent) -> Report:
    print(f"\na training step, {steps.WORLD} ranks")
    found: dict[str, steps.Overhead] = {}
    for model, rounds in extent.step_rounds.items():
        print(f"  the {model} model ...", flush=True)
        found[model] = steps.measure(
            model, rounds=rounds, steps=extent.steps[model], size=extent.model
        )
    _table(
        "a step under tmover, as a multiple of plain DDP's on gloo",
        ("model", "plain, ms", "tmover", "no keeper", "keeper"),
        [
            (name, one.gloo_s * _MS, one.ratio, one.ratio_without_keeper, one.keeper_share)
            for name, one in found.items()
        ],
        digits=3,
    )
    return {
        "step_overhead": {name: one.ratio for name, one in found.items()},
        "keeper": {name: one.keeper_share for name, one in found.items()},
        "steps": {name: one._asdict() for name, one in found.items()},
    }


def _switch(extent: Extent) -> Report:
    report: Report = {"switch_s": {}, "switch": {}, "links_opened_per_stayer": 0}
    rows = []
    for world in extent.switched:
        print(f"\nexchanging a rank of {world}", flush=True)
        count = -(-extent.switches // world) * world
        records = swaps.measure_switch(world, count)
        opened = max(number for record in records for number in record.opened)
        medians = {
            name: swaps.median_of(records, name) for name in (*swaps.Exchange._fields, "switch_s")
        }
        report["switch_s"][str(world)] = medians.pop("switch_s")
        report["switch"][str(world)] = {**medians, "swaps": count, "links": opened}
        report["links_opened_per_stayer"] = max(opened, report["links_opened_per_stayer"])
        times = (report["switch_s"][str(world)], *(medians[name] for name in _SHOWN))
        rows.append((world, *(each * _US for each in times), opened))
    _table(
        "what a swap takes a stayer, median in µs",
        ("ranks", "switch", "commit", "opening", "CPU", "barrier", "prepare", "links"),
        rows,
        digits=0,
    )
    return report


_SHOWN = ("commit_s", "open_s", "cpu_s", "barrier_s", "prepare_s")


def _leaks(extent: Extent) -> Report:
    print(f"\n{extent.swaps} swaps in a world of 4", flush=True)
    footprints = swaps.measure_leaks(4, extent.warm_up + extent.swaps)[extent.warm_up :]
    before, after = _typical(footprints[:10]), _typical(footprints[-10:])
    memory = [one.rss for one in footprints[:51:5]]
    _table(
        "what a stayer holds",
        ("", "fds", "sockets", "threads", "RSS, MiB"),
        [
            ("before", before.fds, before.sockets, before.threads, before.rss / _MIB),
            ("after", after.fds, after.sockets, after.threads, after.rss / _MIB),
        ],
        digits=1,
    )
    return {
        "leaks": {
            "fds": after.fds - before.fds,
            "sockets": after.sockets - before.sockets,
            "threads": after.threads - before.threads,
            "rss_ratio": after.rss / before.rss,
        },
        "stayer_memory": {"every_5_swaps": memory, "ratio": memory[-1] / memory[0]},
    }


def _typical(footprints: Sequence[swaps.Footprint]) -> swaps.Footprint:
    """Return the medians: a link that is just being closed is no leak."""
    columns = zip(*footprints, strict=True)
    return swaps.Footprint(*(statistics.median_low(column) for column in columns))


def _detect(extent: Extent) -> Report:
    del extent
    if importlib.util.find_spec("detect") is None:
        print("\nhow soon a loss is seen: not measured, bench/detect.py is not there")
        return {}
    print("\nhow soon a loss is seen", flush=True)
    measure: Callable[[], dict[str, float]] = importlib.import_module("detect").measure
    found = measure()
    _table("seconds until the last survivor knows", tuple(found), [tuple(found.values())])
    return {"detect_s": found}


PARTS: dict[str, Callable[[Extent], Report]] = {
    "throughput": _throughput,
    "steps": _steps,
    "switch": _switch,
    "leaks": _leaks,
    "detect": _detect,
}


# --- tables ---------------------------------------------------------------------------------------


def _table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[Any]], *, digits: int = 2
) -> None:
    print(f"\n{title}")
    for row in (head, *rows):
        cells = (f"{c:.{digits}f}" if isinstance(c, float) else str(c) for c in row)
        print("  " + "".join(f"{cell:>11}" for cell in cells))


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{world} ranks: {value:.2f}" for world, value in values.items())


if __name__ == "__main__":
    main()
