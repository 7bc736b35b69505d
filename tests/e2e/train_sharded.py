"""The script of end-to-end tests in which no rank holds the whole model.

`--layout fsdp` shards it over all ranks; `hsdp` over pairs of neighbours, replicated over the
pairs; `tp` splits its layers over pairs, whose copies are trained with DDP. Dropout, per-rank
random streams, AdamW, a scheduler and a shuffled loader, as in `train_small.py`.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import time
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tmover

PAIR = 2


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with noise from the batch's own random stream."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator) + 0.1 * torch.randn(16) + random.random()
        return x, x.sum().sin().view(1)


class Shared(DistributedSampler[tuple[torch.Tensor, torch.Tensor]]):
    """Gives the ranks of a pair the same samples."""

    def set_rank(self, rank: int) -> None:
        self.rank = rank // PAIR


def build(hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, hidden),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 1),
    )


def shard(model: nn.Sequential, layout: str, size: int) -> tuple[nn.Module, DeviceMesh]:
    """Return the model as this rank holds it, and the mesh of ranks that see the same samples."""
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
        return _fully(model, mesh), mesh["shard"]
    mesh = init_device_mesh("cpu", (size // PAIR, PAIR), mesh_dim_names=("data", "pair"))
    if layout == "hsdp":
        return _fully(model, mesh), mesh
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    split = parallelize_module(model, mesh["pair"], plan)
    return split, mesh["data"]


def _fully(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layout", choices=["fsdp", "hsdp", "tp"], default="fsdp")
    parser.add_argument("--checkpoint", nargs=2, default=None)
    parser.add_argument("--hold", nargs=2, default=None)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    session = tmover.init(seed=7)
    torch.manual_seed(0)
    model, data = shard(build(arguments.hidden), arguments.layout, session.world_size)
    split = arguments.layout == "tp"
    part = session.rank // PAIR if split else session.rank
    parts = session.world_size // PAIR if split else session.world_size
    torch.manual_seed(100 + part)
    random.seed(200 + part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    dataset = Waves()
    kind: Any = Shared if split else DistributedSampler
    sampler = kind(dataset, num_replicas=parts, rank=part)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)
    if arguments.checkpoint is not None:
        session.checkpoint(arguments.checkpoint[0], every=int(arguments.checkpoint[1]))

    for step in session.steps(loader, total=arguments.steps):
        with step:
            x, y = step.batch
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            if split:
                _average(model, data)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed and session.rank == 0:
            print("step", step.index, loss.item(), flush=True)
            while arguments.hold is not None and step.index == int(arguments.hold[0]):
                if pathlib.Path(arguments.hold[1]).exists():
                    break
                time.sleep(0.005)

    for last in session.final():
        with last:
            total = torch.tensor([float(session.rank)])
            dist.all_reduce(total)
        assert total.item() == sum(range(session.world_size)) or not last.committed


def _average(model: nn.Module, data: DeviceMesh) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        dist.all_reduce(local, group=data.get_group())
        local /= data.size()


main()
