"""A training that a swap can happen to: what it computes, and all that one rank of it holds."""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import os
import signal
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

WIDTH = 16
ROWS = 8


class Phase(str, enum.Enum):
    """Where in a step a process dies."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Training:
    """A model and its optimizer, built from a seed on whichever process group is the default.

    A step computes gradients; `apply` uses them. What changes in a step is in `records`, and what
    changes in `apply` is in `tensors`: together they are all that this rank holds.
    """

    size: ClassVar[int]
    """The number of ranks."""
    replicated: ClassVar[bool] = False
    """Whether all ranks hold the same, so that any of them can hand it to a joiner."""
    tolerance: ClassVar[float] = 1e-5
    """How far another order of summation may lead in a few steps."""
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.build()

    def build(self) -> None:
        """Make `model` and `optimizer`."""
        raise NotImplementedError

    # --- a step -----------------------------------------------------------------------------------

    def step(self, index: int) -> float:
        """Compute the gradients of a step; return the loss."""
        self.optimizer.zero_grad()
        return self.learn(self.batch(index))

    def learn(self, batch: torch.Tensor) -> float:
        """Add the gradients of a batch; return its loss."""
        loss = self.model(batch).square().mean()
        loss.backward()
        return float(loss.item())

    def batch(self, index: int, part: int = 0) -> torch.Tensor:
        """Return data that depends on the step, and on the rank as far as it has its own."""
        seed = (1000 * index + self.share) * 10 + part
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))

    @property
    def share(self) -> int:
        """Which part of the data this rank computes with."""
        return dist.get_rank()

    def apply(self) -> None:
        """Use the gradients."""
        self.optimizer.step()

    # --- death ------------------------------------------------------------------------------------

    def doom(self, phase: Phase) -> None:
        """Let this process die in its next step, while the others go on."""
        self.heart().register_forward_hook(functools.partial(die_in, phase))

    def heart(self) -> nn.Module:
        """Return the module in which a doomed process dies: one in the middle."""
        layers = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        return layers[len(layers) // 2]

    # --- what it holds ----------------------------------------------------------------------------

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's parameters and optimizer state, or its shards of them."""
        found = [local(parameter) for parameter in self.model.parameters()]
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    kept = optimizer.state.get(parameter, {})
                    found += [local(value) for _, value in sorted(kept.items())]
        return found

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Yield those that have state of their own."""
        yield self.optimizer

    def records(self) -> dict[str, Any]:
        """Return what a step changes beside the gradients: buffers and random streams."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        return {"rng": torch.get_rng_state(), "buffers": buffers}

    def restore(self, records: dict[str, Any]) -> None:
        """Take back what a step has changed, or what another process has recorded."""
        torch.set_rng_state(records["rng"])
        copy_all(list(self.model.buffers()), records["buffers"])

    def dump(self) -> bytes:
        """Return all that this rank holds."""
        written = io.BytesIO()
        torch.save((self.tensors(), self.records()), written)
        return written.getvalue()

    def load(self, dumped: bytes) -> None:
        """Hold what another process has held."""
        tensors, records = torch.load(io.BytesIO(dumped))
        copy_all(self.tensors(), tensors)
        self.restore(records)

    def share_from(self, source: int) -> None:
        """Hold what rank `source` holds, over the default group; every rank calls it."""
        records = self.records()
        for tensor in [*self.tensors(), records["rng"], *records["buffers"]]:
            dist.broadcast(tensor, source)
        self.restore(records)

    def digest(self) -> str:
        """Return a hash over every bit that this rank holds."""
        made = hashlib.sha256()
        for leaf in tree_leaves((self.tensors(), self.records())):
            made.update(_bits(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
        return made.hexdigest()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into those that are in use."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def die_in(phase: Phase, _module: nn.Module, _inputs: Any, output: Any) -> None:
    """Die now, or when the gradient of this output is there."""
    if phase is Phase.FORWARD:
        die()
    output.register_hook(die)


def die(_gradient: torch.Tensor | None = None) -> None:
    """End this process as a node that fails does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def layers(count: int, *, width: int = WIDTH) -> nn.Sequential:
    """Return linear layers with something between them."""
    made: list[nn.Module] = []
    for _ in range(count):
        made += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*made[:-1])
