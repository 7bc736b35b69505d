"""One rank of a run whose state is written by some ranks, laid out in one way, and read by others.

`train.py save|load DIRECTORY LAYOUT`, with RANK, WORLD_SIZE and STORE in the environment. Prints a
hash of all parameters and of what the optimizer holds, each tensor whole.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import sys
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tmover.state import shelf, stored
from tmover.state.capture import Tracked
from tmover.state.position import Position
from tmover.state.records import Record
from tmover.state.stored import Place, Staged

STEP = 3
HERE = Position(0, 2, 5)


def build(layout: str, size: int, *, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7), nn.LayerNorm(7))
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "pair"))
        return parallelize_module(
            model, mesh["pair"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
    shape, names = ((size,), ("shard",))
    if layout == "hsdp":
        shape, names = (size // 2, 2), ("data", "shard")  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    total = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            total.update(whole(tensor).numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    action, directory, layout = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = build(layout, size, seed=0 if action == "save" else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tracked = Tracked()
    tracked.track("model", model)
    tracked.track("optimizer", optimizer)
    if action == "save":
        for _ in range(STEP):
            model(torch.ones(4, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        save(tracked, directory, rank)
    else:
        place = Place(rank, size, 7)
        found = shelf.read(directory / f"step-{STEP}")
        stored.restore(found, tracked, place, HERE)
    print("digest", digest(model, optimizer))
    dist.destroy_process_group()


def save(tracked: Tracked, directory: pathlib.Path, rank: int) -> None:
    held: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(held, tracked.holdings())
    replicas = tuple(map(held.index, held))
    record = Record.capture(tracked, position=HERE).encode()
    unfinished = shelf.partial(directory, STEP, "a")
    staged = Staged(tracked, step=STEP, record=record, rank=rank, replicas=replicas)
    staged.write(shelf.part(unfinished, rank))
    dist.barrier()
    if rank == 0:
        stored.assemble(unfinished, step=STEP, job="j", replicas=replicas)


main()
