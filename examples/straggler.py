"""See a node become slow, be found out, and be replaced: throughput before, with it, and after.

    python examples/straggler.py            about a minute, on this machine alone

A job of three nodes trains `train_gpt.py`, with a standby. From a step on one node takes longer for
every step, as one does whose GPU is throttled, and all others wait for it. The controller compares
each rank's own part of a step, without its waits, with its peers', and moves the slow node's ranks
to the standby. In earnest that takes minutes (`[controller] straggler_for_s`); here, seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import tempfile

import msgspec

from tmover.cluster import JobSpec, LocalCluster, agent_argv
from tmover.config import load
from tmover.demo.trace import Line, read
from tmover.errors import TmoverError
from tmover.wire import JobStatus

NODES = 3
SLOW_NODE = "node2"
SETTLED = 5
"""So many steps after a change are not counted."""
WAIT_S = 300.0
SETTINGS = {
    "TMOVER_CONTROLLER_STRAGGLERS": "act",
    "TMOVER_CONTROLLER_STRAGGLER_FOR_S": "3",
    "TMOVER_CONTROLLER_STRAGGLER_MARGIN": "1.5",
    "OMP_NUM_THREADS": "1",
}


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Steps per second, as rank 0 saw them."""

    before: float
    slowed: float
    after: float


def main() -> int:
    args = arguments().parse_args()
    os.environ.update(SETTINGS)
    with tempfile.TemporaryDirectory(prefix="tmover-straggler-") as name:
        folder = pathlib.Path(name)
        try:
            with LocalCluster(folder / "state", load()) as cluster:
                lines = train(cluster, folder / "trace", args)
        except TmoverError as error:
            print(error, file=sys.stderr)
            return 1
    found = throughput(lines, args.slow_at)
    print(f"before      {found.before:6.1f} steps/s")
    print(f"slowed      {found.slowed:6.1f} steps/s")
    print(f"after       {found.after:6.1f} steps/s")
    if args.json:
        args.json.write_bytes(msgspec.json.encode(found))
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=350, help="of the whole run")
    parser.add_argument("--slow-at", type=int, default=60, help="the step from which it is slow")
    parser.add_argument("--seconds", type=float, default=0.2, help="by how much, in each step")
    parser.add_argument("--json", type=pathlib.Path, help="write the three numbers there")
    return parser


def train(cluster: LocalCluster, trace: pathlib.Path, args: argparse.Namespace) -> list[Line]:
    """Run the job to its end, say what is seen on the way, and return what its ranks wrote."""
    script = pathlib.Path(__file__).with_name("train_gpt.py")
    slow = f"slow:node={SLOW_NODE}-,point=step_open,step={args.slow_at},seconds={args.seconds}"
    job = cluster.submit(
        JobSpec(
            nodes=NODES,
            standby=1,
            nproc=1,
            argv=agent_argv(str(script), "--steps", str(args.steps)),
            env={**os.environ, "TMOVER_TRACE": str(trace), "TMOVER_INJECT": slow},
            cwd=pathlib.Path.cwd(),
        )
    )
    print(f"{NODES} nodes and a standby start; {SLOW_NODE} is slow from step {args.slow_at} on")
    status = cluster.wait(job, lambda seen: bool(seen.slow) or is_left(seen), timeout_s=WAIT_S)
    print(f"step {status.step}: {status.slow or 'it was found'}")
    status = cluster.wait(job, is_left, timeout_s=WAIT_S)
    print(f"{SLOW_NODE} has left: its ranks train on {status.slots[1].node}")
    status = cluster.wait(job, lambda seen: seen.code is not None, timeout_s=WAIT_S)
    for note in status.notes:
        print(f"  {note}")
    return read(trace)


def is_left(status: JobStatus) -> bool:
    return status.phase == "training" and SLOW_NODE not in {slot.node for slot in status.slots}


def throughput(lines: list[Line], slow_at: int) -> Throughput:
    """Return the steps per second of rank 0 before the node was slow, until it was left, after."""
    at = {line.step: line.t for line in lines if line.event == "committed" and line.rank == 0}
    moved = max(line.step or 0 for line in lines if line.event == "passed")
    last = max(step for step in at if step is not None)
    return Throughput(
        before=_rate(at, SETTLED, slow_at),
        slowed=_rate(at, slow_at, moved),
        after=_rate(at, moved + SETTLED, last),
    )


def _rate(at: dict[int | None, float], first: int, last: int) -> float:
    lengths = [at[step + 1] - at[step] for step in range(first, last) if step + 1 in at]
    return round(1 / statistics.median(lengths), 2)


if __name__ == "__main__":
    sys.exit(main())
