"""Fully sharded models, on a line and on a grid."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from integration.comm.wrappers.training import Training, layers


class Sharded(Training):
    """Units inside a unit; three ranks do not divide what they share."""

    size = 3
    options: ClassVar[dict[str, Any]] = {}

    def build(self) -> None:
        self.model = layers(4)
        for index in (0, 2, 4):
            fully_shard(self.model[index], mesh=self.grid(), **self.options)
        fully_shard(self.model, mesh=self.grid(), **self.options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def grid(self) -> DeviceMesh:
        """Return the ranks, as they share."""
        if not hasattr(self, "_grid"):
            self._grid = self.arrange()
        return self._grid

    def arrange(self) -> DeviceMesh:
        """Make the grid."""
        return init_device_mesh("cpu", (dist.get_world_size(),))


class MixedPrecision(Sharded):
    """Computes in bfloat16, reduces in float32."""

    tolerance = 1e-2
    options: ClassVar[dict[str, Any]] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }

    def learn(self, batch: torch.Tensor) -> float:
        return super().learn(batch.bfloat16())


class Hybrid(Sharded):
    """Two replicas of four shards."""

    size = 8

    def arrange(self) -> DeviceMesh:
        return init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
