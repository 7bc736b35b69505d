"""A small training script, and jobs that run it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest

from tmover.cluster import JobSpec, agent_argv

TRAIN = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel
import tmover

session = tmover.init()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.track(model=model, optimizer=optimizer)

class Same(list):
    def set_rank(self, rank):
        "Every rank reads the same."

batches = Same(torch.randn(2, 4) for _ in range(64))
for step in session.steps(batches, total=int(sys.argv[1])):
    with step:
        model(step.batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step.committed and session.rank == 0:
        print("committed", step.index, flush=True)
"""

MakeSpec = Callable[..., JobSpec]


@pytest.fixture
def train(tmp_path: pathlib.Path) -> pathlib.Path:
    """A script that trains for as many steps as its argument says."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return script


@pytest.fixture
def spec(train: pathlib.Path) -> MakeSpec:
    """Makes the description of a job that runs `train`, or the given text."""

    def make(
        *arguments: str,
        text: str = "",
        nodes: int = 2,
        standby: int = 0,
        nproc: int = 1,
        **env: str,
    ) -> JobSpec:
        script = train
        if text:
            script = train.with_name("other.py")
            script.write_text(text)
        return JobSpec(
            nodes=nodes,
            standby=standby,
            nproc=nproc,
            argv=agent_argv(str(script), *arguments, nproc=nproc),
            env={**os.environ, **env},
            cwd=train.parent,
        )

    return make
