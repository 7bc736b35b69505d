"""Layers whose weights are spread over ranks, alone and beside data parallelism."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from integration.comm.wrappers.training import Training, layers

_PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


class TensorParallel(Training):
    """All ranks compute on the same data, each with its part of the weights."""

    size = 4

    def build(self) -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        self.model = parallelize_module(layers(2), mesh, _PLAN)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @property
    def share(self) -> int:
        return 0


class TensorAndData(Training):
    """Two shards of four parts."""

    size = 8

    def build(self) -> None:
        self._mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        blocks = [
            parallelize_module(layers(2).append(nn.GELU()), self._mesh["tp"], _PLAN)
            for _ in range(2)
        ]
        self.model = nn.Sequential(*blocks)
        for block in blocks:
            fully_shard(block, mesh=self._mesh["dp"])
        fully_shard(self.model, mesh=self._mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @property
    def share(self) -> int:
        return self._mesh.get_local_rank("dp")
