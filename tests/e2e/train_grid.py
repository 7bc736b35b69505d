"""The script of end-to-end tests with three kinds of parallelism: two stages of a pipeline, whose
layers are split over pairs of ranks, and as many copies of all that as ranks are left.

The pair is the innermost: with two ranks to a node it never leaves it. Dropout, per-rank random
streams, AdamW and a shuffled loader, as in `train_small.py`.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tmover

STAGES, PAIR = 2, 2
ROWS, MICROBATCHES, WIDTH, HIDDEN = 4, 2, 8, 16


class OfPipeline(DistributedSampler[tuple[torch.Tensor, ...]]):
    """Gives all ranks of a pipeline the same samples."""

    def set_rank(self, rank: int) -> None:
        self.rank = rank // PAIR % self.num_replicas


def layers(*, is_last: bool) -> nn.Sequential:
    out = 1 if is_last else WIDTH
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, out)
    )


def put_in_line(module: nn.Module, mesh: DeviceMesh, *, is_last: bool) -> PipelineStage:
    micro = ROWS // MICROBATCHES
    between = torch.zeros(micro, WIDTH, requires_grad=True)
    return PipelineStage(
        module,
        mesh.get_local_rank("stage"),
        STAGES,
        torch.device("cpu"),
        input_args=between if is_last else torch.zeros(micro, WIDTH),
        output_args=torch.zeros(micro, 1, requires_grad=True) if is_last else between,
        group=mesh.get_group("stage"),
    )


def average(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients over the copies."""
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        dist.all_reduce(local, group=mesh.get_group("copy"))
        local /= mesh["copy"].size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hold", nargs=2, default=None)
    arguments = parser.parse_args()
    session = tmover.init(seed=7)
    copies = session.world_size // (STAGES * PAIR)
    mesh = init_device_mesh("cpu", (STAGES, copies, PAIR), mesh_dim_names=("stage", "copy", "pair"))
    is_last = mesh.get_local_rank("stage") == STAGES - 1
    torch.manual_seed(mesh.get_local_rank("stage"))
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    model = parallelize_module(layers(is_last=is_last), mesh["pair"], plan)
    schedule = ScheduleGPipe(
        put_in_line(model, mesh, is_last=is_last), MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    torch.manual_seed(100 + mesh.get_local_rank("copy"))
    random.seed(200 + session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(96, WIDTH, generator=generator), torch.randn(96, 1, generator=generator)
    )
    sampler = OfPipeline(data, num_replicas=copies, rank=mesh.get_local_rank("copy"))
    loader = DataLoader(data, batch_size=ROWS, sampler=sampler)
    session.track(model=model, optimizer=optimizer)
    for step in session.steps(loader, total=arguments.steps):
        with step:
            x, y = step.batch
            if is_last:
                schedule.step(target=y, losses=[])
            else:
                schedule.step(x)
            average(model, mesh)
            optimizer.step()
            optimizer.zero_grad()
        hold = arguments.hold if step.committed and session.rank == 0 else None
        while hold and step.index == int(hold[0]) and not pathlib.Path(hold[1]).exists():
            time.sleep(0.005)


main()
