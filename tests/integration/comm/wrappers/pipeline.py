"""Pipelines: each rank has some of the layers, and sends what it has computed to the next."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

from integration.comm.wrappers.training import ROWS, WIDTH, Training, layers

STAGES = 4
MICROBATCHES = 4


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class GPipe(Training):
    """All forward, then all backward."""

    size = 4
    schedule_type: ClassVar[Any] = ScheduleGPipe

    def build(self) -> None:
        self.group = self.line()
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        whole = [layers(2) for _ in range(STAGES)]
        self.indices = range(rank, STAGES, size)
        self.model = nn.ModuleList(self.wrap(whole[index]) for index in self.indices)
        example = torch.zeros(ROWS // MICROBATCHES, WIDTH)
        activation = torch.zeros_like(example, requires_grad=True)
        self.stages = [
            PipelineStage(
                module,
                index,
                STAGES,
                torch.device("cpu"),
                input_args=activation if index else example,
                output_args=activation,
                group=self.group,
            )
            for index, module in zip(self.indices, self.model, strict=True)
        ]
        self.schedule = self.plan()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def line(self) -> dist.ProcessGroup:
        """Return the group of the stages."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return a stage's module as it is used."""
        return module

    def plan(self) -> Any:
        """Return the schedule of this rank's stages."""
        (stage,) = self.stages
        return self.schedule_type(stage, MICROBATCHES, loss_fn=_loss)

    @property
    def share(self) -> int:
        return 0

    def step(self, index: int) -> float:
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (self.batch(index),) if 0 in self.indices else ()
        if STAGES - 1 in self.indices:
            self.schedule.step(*inputs, target=self.batch(index, part=1), losses=losses)
        else:
            self.schedule.step(*inputs)
        return float(sum(loss.item() for loss in losses))


class OneForwardOneBackward(GPipe):
    """Forward and backward take turns."""

    schedule_type = Schedule1F1B


class Interleaved(GPipe):
    """Each rank has two stages."""

    size = 2

    def plan(self) -> Any:
        return ScheduleInterleaved1F1B(list(self.stages), MICROBATCHES, loss_fn=_loss)


class PipelineAndData(OneForwardOneBackward):
    """Two pipelines side by side; each stage's gradients are reduced between them."""

    size = 8

    def line(self) -> dist.ProcessGroup:
        self._mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "dp"))
        return self._mesh.get_group("pp")

    def wrap(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, process_group=self._mesh.get_group("dp"))

    @property
    def share(self) -> int:
        return self._mesh.get_local_rank("dp")
