"""The script of end-to-end tests in which each rank holds some of the layers: a pipeline.

Two stages of different layers, or as many as `--stages` says, `--pipelines` of them side by side:
rank 0 is in the first stage, the last rank in the last one, and each stage's gradients are reduced
between the pipelines. With one pipeline no rank holds what another one does. Dropout in all stages,
per-rank random streams, AdamW, a scheduler and a shuffled loader, as in `train_small.py`.
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tmover

ROWS = 4
MICROBATCHES = 2
WIDTH = 16
SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples whose noise is drawn from the batch's own random stream."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return x + 0.1 * torch.randn(WIDTH) + random.random(), x.sum().sin().view(1)


class OfPipeline(DistributedSampler[tuple[torch.Tensor, torch.Tensor]]):
    """Gives all ranks of a pipeline the same samples."""

    def set_rank(self, rank: int) -> None:
        self.rank = rank % self.num_replicas


def layers(stage: int, stages: int, hidden: int) -> nn.Module:
    if stage == 0:
        return nn.Sequential(nn.Linear(WIDTH, hidden), nn.LayerNorm(hidden), nn.Dropout(0.1))
    if stage < stages - 1:
        return nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Dropout(0.1))
    return nn.Sequential(
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 1)
    )


def put_in_line(module: nn.Module, mesh: DeviceMesh, hidden: int) -> PipelineStage:
    """Return the stage. It is told what comes in and goes out, and asks no neighbour for that."""
    index, micro = mesh.get_local_rank("stage"), ROWS // MICROBATCHES
    is_last = index == mesh["stage"].size() - 1
    between = torch.zeros(micro, hidden, requires_grad=True)
    return PipelineStage(
        module,
        index,
        mesh["stage"].size(),
        torch.device("cpu"),
        input_args=between if index else torch.zeros(micro, WIDTH),
        output_args=torch.zeros(micro, 1, requires_grad=True) if is_last else between,
        group=mesh.get_group("stage"),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--schedule", choices=[*SCHEDULES], default="1f1b")
    parser.add_argument("--hold", nargs=2, default=None)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    session = tmover.init(seed=7)
    mesh = init_device_mesh(
        "cpu", (arguments.stages, arguments.pipelines), mesh_dim_names=("stage", "pipeline")
    )
    torch.manual_seed(mesh.get_local_rank("stage"))
    model = layers(mesh.get_local_rank("stage"), arguments.stages, arguments.hidden)
    if arguments.pipelines > 1:
        model = DistributedDataParallel(model, process_group=mesh.get_group("pipeline"))
    stage = put_in_line(model, mesh, arguments.hidden)
    schedule = SCHEDULES[arguments.schedule](stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(100 + session.rank)
    random.seed(200 + session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    dataset = Waves()
    sampler = OfPipeline(
        dataset, num_replicas=arguments.pipelines, rank=mesh.get_local_rank("pipeline")
    )
    loader = DataLoader(dataset, batch_size=ROWS, sampler=sampler)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for step in session.steps(loader, total=arguments.steps):
        with step:
            x, y = step.batch
            losses: list[torch.Tensor] = []
            if stage.is_last:
                schedule.step(target=y, losses=losses)
            else:
                schedule.step(x)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed and stage.is_last:
            print("step", step.index, sum(loss.item() for loss in losses), flush=True)
        if step.committed and session.rank == 0:
            _hold(arguments.hold, step.index)

    for last in session.final():
        with last:
            total = torch.tensor([float(session.rank)])
            dist.all_reduce(total)
        assert total.item() == sum(range(session.world_size)) or not last.committed


def _hold(hold: list[str] | None, index: int) -> None:
    while hold is not None and index == int(hold[0]) and not pathlib.Path(hold[1]).exists():
        time.sleep(0.005)


main()
