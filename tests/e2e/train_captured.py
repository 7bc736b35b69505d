"""The script of end-to-end tests in which a script keeps its rank where nobody can change it.

What it trains depends on that rank: each has its own scale. `--keep` says where: in a variable of
the module or of the function that has the loop, in an object, in what a function has closed over,
in a tensor, in a module of the script's own, or, with `session`, nowhere: it asks each time.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tmover

KEPT = -1
"""The rank, with `--keep module`."""
KINDS = ["session", "module", "function", "object", "closure", "tensor", "import"]


class Trainer:
    """What an engineer writes around a loop."""

    def __init__(self, rank: int) -> None:
        self.settings = {"rank": rank}


def module_of_its_own(session: tmover.Session) -> None:
    """Let a module that the script imports keep the rank."""
    path = pathlib.Path(f"settings_{session.rank}.d")
    path.mkdir(exist_ok=True)
    (path / "captured_settings.py").write_text("import os\nRANK = int(os.environ['RANK'])\n")
    sys.path.insert(0, str(path))


def scaler(keep: str, session: tmover.Session) -> Callable[[], float]:
    """Return what gives this rank's scale, from where it is kept."""
    rank = session.rank
    if keep == "closure":
        return lambda: 1.0 + rank
    if keep == "session":
        return lambda: 1.0 + session.rank
    if keep == "tensor":
        scale = torch.tensor(1.0 + rank)
        return lambda: float(scale)
    if keep == "object":
        trainer = Trainer(rank)
        return lambda: 1.0 + trainer.settings["rank"]
    if keep == "import":
        module_of_its_own(session)
        import captured_settings  # type: ignore[import-not-found]  # written by this script

        return lambda: 1.0 + captured_settings.RANK
    if keep == "module":
        return lambda: 1.0 + KEPT
    return lambda: 1.0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--keep", choices=KINDS, default="session")
    parser.add_argument("--tire", type=int, default=1 << 30, help="rehearse no more steps")
    parser.add_argument("--roles", action="store_true", help="let rank 0 be a role of its own")
    parser.add_argument("--once", action="store_true", help="fail if run twice in a process")
    parser.add_argument("--hold", nargs=2, default=None)
    return parser.parse_args()


def main() -> None:
    global KEPT  # as scripts do
    arguments = parsed()
    if arguments.once:
        if hasattr(torch, "captured_once"):
            msg = "initialised twice"
            raise RuntimeError(msg)
        torch.captured_once = True  # type: ignore[attr-defined]
    session = tmover.init(seed=3)
    session.role = "first" if arguments.roles and session.rank == 0 else ""
    KEPT = session.rank if arguments.keep == "module" else -1
    rank = session.rank if arguments.keep == "function" else -1
    scale = scaler(arguments.keep, session)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    session.track(model=model, optimizer=optimizer)
    rehearsed = 0
    for step in session.steps(loader, total=arguments.steps):
        with step:
            x, y = step.batch
            rehearsed += session.sandbox
            if rehearsed > arguments.tire:
                msg = "it is tired"
                raise RuntimeError(msg)
            mine = 1.0 + rank if arguments.keep == "function" else scale()
            loss: Any = nn.functional.mse_loss(model(x * mine), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        hold = arguments.hold if step.committed and session.rank == 0 else None
        while hold and step.index == int(hold[0]) and not pathlib.Path(hold[1]).exists():
            time.sleep(0.005)


main()
