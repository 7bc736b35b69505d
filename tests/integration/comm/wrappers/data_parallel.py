"""DistributedDataParallel in the ways it is used."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from integration.comm.wrappers.training import WIDTH, Training, layers

BUCKET_MB = 0.002
"""Smaller than two layers: there are several buckets."""


class Buckets(Training):
    """A model in several buckets, reduced while backward goes on."""

    size = 3
    replicated = True
    options: ClassVar[dict[str, Any]] = {}
    bucket_mb: ClassVar[float] = BUCKET_MB
    model: DistributedDataParallel

    def build(self) -> None:
        self.model = DistributedDataParallel(
            self.make(), bucket_cap_mb=self.bucket_mb, **self.options
        )
        self.optimizer = self.choose()

    def make(self) -> nn.Module:
        """Return what is wrapped."""
        return layers(4)

    def choose(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


class Accumulation(Buckets):
    """Gradients of two batches are added up before they are reduced."""

    def step(self, index: int) -> float:
        self.optimizer.zero_grad()
        with self.model.no_sync():
            first = self.learn(self.batch(index, part=1))
        return first + self.learn(self.batch(index, part=2))


class StaticGraph(Buckets):
    """What is used and in which order is said to be the same in every step."""

    options: ClassVar[dict[str, Any]] = {"static_graph": True}


class UnusedParameters(Buckets):
    """One layer is used in every second step only: ranks tell each other which gradients exist."""

    options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

    def make(self) -> nn.Module:
        return Sometimes()

    def step(self, index: int) -> float:
        inner = self.model.module
        assert isinstance(inner, Sometimes)
        inner.detour = index % 2 == 0
        return super().step(index)


class Sometimes(nn.Module):
    """Takes a detour on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.always = layers(3)
        self.aside = layers(1)
        self.detour = True

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        there: torch.Tensor = self.always(batch)
        return self.aside(there) if self.detour else there


class HalfPrecision(Buckets):
    """A communication hook reduces gradients as float16."""

    tolerance = 2e-3

    def build(self) -> None:
        super().build()
        self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def choose(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)


class LowRank(Buckets):
    """A communication hook sends factors, and each rank remembers what it has left out.

    In one bucket: see `LowRankBuckets`.
    """

    bucket_mb = 1.0
    replicated = False
    tolerance = 1e-4

    def build(self) -> None:
        super().build()
        self.hook = power_sgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=1,
            start_powerSGD_iter=2,
            min_compression_rate=0.5,
        )
        self.model.register_comm_hook(self.hook, power_sgd.powerSGD_hook)

    def choose(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def records(self) -> dict[str, Any]:
        kept = self.hook
        drawn: Any = kept.rng.get_state()
        _, words, *place = drawn
        return super().records() | {
            "iter": kept.iter,
            "rng_words": torch.from_numpy(words.copy()),
            "rng_place": place,
            "errors": _copies(kept.error_dict),
            "p": _copies(kept.p_memory_dict),
            "q": _copies(kept.q_memory_dict),
        }

    def restore(self, records: dict[str, Any]) -> None:
        super().restore(records)
        kept = self.hook
        kept.iter = records["iter"]
        kept.rng.set_state(("MT19937", records["rng_words"].numpy(), *records["rng_place"]))
        kept.error_dict = _copies(records["errors"])
        kept.p_memory_dict = _copies(records["p"])
        kept.q_memory_dict = _copies(records["q"])


class LowRankBuckets(LowRank):
    """The same in several buckets, which hangs on gloo, and so on a fabric with gloo inside.

    The hook starts the next collective of a bucket when one is done, in a thread of gloo's or in
    the caller's. So ranks start those of several buckets in different orders (seen: 64, 34 elements
    on two ranks, 64, 0, 64, 34 on the third), and gloo pairs what was started by its number.
    """

    bucket_mb = BUCKET_MB


def _copies(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {index: tensor.clone() for index, tensor in tensors.items()}


class BatchNorm(Buckets):
    """Rank 0's running averages are broadcast before each step, and a random mask is drawn."""

    replicated = False

    def make(self) -> nn.Module:
        inner = layers(3)
        inner.insert(1, nn.BatchNorm1d(WIDTH))
        inner.insert(3, nn.Dropout(0.25))
        return inner

    def choose(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)


class ZeroRedundancy(Buckets):
    """Each rank has the optimizer state of its part of the parameters, and broadcasts them."""

    replicated = False

    def choose(self) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=1e-2
        )
        return made

    def optimizers(self) -> Any:
        assert isinstance(self.optimizer, ZeroRedundancyOptimizer)
        yield self.optimizer.optim
