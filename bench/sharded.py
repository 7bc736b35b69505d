"""The job of `bench/copying.py`: a sharded model, trained in turns with and without copies.

FSDP2 over all ranks, so that none has a replica. A block of steps after which each rank copies what
it holds to the other node is followed by one after which it does not, in the same processes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tmover
from tmover.worker import bootstrap
from tmover.worker.copies import Copies
from training import SIZES, Size, loader_of

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

from train_gpt import GPT

COPIES, NONE = "copies", "none"


def build(size: Size, world_size: int) -> nn.Module:
    torch.manual_seed(1)
    model = GPT(width=size.width, layers=size.layers, heads=size.heads)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    whole: nn.Module = model
    fully_shard(whole, mesh=mesh)
    return whole


def stepper(session: tmover.Session, size: Size, total: int) -> Callable[[], float]:
    """Return a step to be called `total` times; each returns how long it took, in seconds."""
    model = build(size, session.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.track(model=model, optimizer=optimizer)
    steps = session.steps(loader_of(size), total=total)

    def step() -> float:
        begin = time.perf_counter()
        now = next(steps)
        with now:
            loss = model(*now.batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begin

    return step


def copies() -> Copies:
    runtime = bootstrap.current()
    assert runtime is not None
    return runtime.copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of a block")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of this run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    session = tmover.init()
    step = stepper(session, SIZES[args.size], 2 * args.rounds * args.steps + 1)
    step()  # its vote has shown that nobody has a replica
    times: dict[str, list[list[float]]] = {COPIES: [], NONE: []}
    for number in range(args.rounds):
        for name in (COPIES, NONE) if number % 2 == 0 else (NONE, COPIES):
            copies().active = name == COPIES
            times[name].append([step() for _ in range(args.steps)])
    if session.rank == 0:
        report = {"times": times, "host_bytes": copies().host_bytes}
        (args.folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
