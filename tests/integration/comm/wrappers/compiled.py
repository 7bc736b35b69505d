"""Compiled models: the graph is compiled once, also through a swap."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import distributed as dist

from integration.comm.wrappers.data_parallel import Buckets
from integration.comm.wrappers.sharded import Sharded
from integration.comm.wrappers.training import Phase, Training, die


class Compiled(Training):
    """Compiles the model that it inherits."""

    size = 2
    backend: ClassVar[str] = "aot_eager"
    _phase: Phase | None = None

    def build(self) -> None:
        super().build()
        self.compiled = torch.compile(self.model, backend=self.backend)

    def learn(self, batch: torch.Tensor) -> float:
        output = self.compiled(batch)
        if self._phase is Phase.BACKWARD:
            output.register_hook(die)
        loss = output.square().mean()
        loss.backward()
        return float(loss.item())

    def doom(self, phase: Phase) -> None:
        """A compiled graph does not look at hooks that come later."""
        assert phase is Phase.BACKWARD
        self._phase = phase


class CompiledBuckets(Compiled, Buckets):
    """DDP compiled: the graph is split where a bucket ends."""

    def build(self) -> None:
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1024  # dynamo refuses buckets smaller than this
        super().build()


class CompiledShards(Compiled, Sharded):
    """FSDP2 compiled."""

    size = 2


class InductorBuckets(CompiledBuckets):
    """DDP compiled to machine code."""

    backend = "inductor"

    def build(self) -> None:
        from torch._inductor import config

        config.compile_threads = 1
        super().build()
