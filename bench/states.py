"""The state that benchmarks hand over: a model of many sizes of tensors, and its optimizer."""

from __future__ import annotations

import torch
from torch import nn

from tmover.state.capture import Tracked
from tmover.state.memory import view

MIB = 1 << 20


class State:
    """A model of many sizes of tensors, its optimizer, and one flat tensor of as many bytes."""

    def __init__(self, mib: int, fill: float) -> None:
        sizes = [4 * MIB, MIB, 256 << 10, 4096, 1024, 64]
        module = nn.Module()
        left, index = mib * MIB // 4 // 3, 0
        while left > 0:
            size = min(left, sizes[index % len(sizes)])
            module.register_parameter(f"p{index}", nn.Parameter(torch.full((size,), fill)))
            left, index = left - size, index + 1
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self.tracked = Tracked()
        self.tracked.track("model", module)
        self.tracked.track("optimizer", optimizer)
        self.flat = view(torch.full((mib * MIB // 4,), fill))
