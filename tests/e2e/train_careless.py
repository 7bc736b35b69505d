"""A script that writes where it comes along: two ranks save without asking `committed`.

It draws random numbers, counts and steps in whatever way a script may, and logs with each step
whether Python's functions are those that Python came with. `--hold STEP FILE` as `train_small`.
`--fail` has a standby fail at rest, in the first step that it does to prove itself again.
"""

from __future__ import annotations

import _io
import argparse
import atexit
import builtins
import functools
import itertools
import logging
import os
import pathlib
import posix
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tmover

FAILURES = {"error": RuntimeError, "exit": SystemExit}
RESTED = 4
"""The first step after those that a standby rehearses, and the one in which it tries to change."""
IDS = itertools.count()
"""What a script's module counts for itself, and does not track."""


@functools.lru_cache
def scale(width: int) -> float:
    return random.random() * width


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fail", choices=[*FAILURES], default=None)
    parser.add_argument("--hold", nargs=2, default=None)
    return parser.parse_args()


def main() -> None:
    arguments, session = parsed(), tmover.init(seed=7)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    model = DistributedDataParallel(body)
    torch.manual_seed(100 + session.rank)
    random.seed(100 + session.rank)
    np.random.seed(100 + session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    average, dice = AveragedModel(body, use_buffers=True), torch.Generator().manual_seed(3)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, average=average, dice=dice)
    data = TensorDataset(torch.arange(384.0).view(96, 4).sin())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    places = _made("logs", "saved")
    log = logging.FileHandler(places[0] / f"rank{session.rank}.log")
    atexit.register(lambda: _append(places[0] / "ended.log", f"{os.getpid()}\n"))
    try:
        for step in session.steps(loader, total=arguments.steps):
            with step:
                _fail(arguments.fail if session.sandbox and step.index == RESTED else None)
                x = step.batch[0] + torch.randn(4, generator=dice) + np.random.random()
                noise = random.random() + random.SystemRandom().random() * 0
                (model(x * scale(4) * 0 + x + noise) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(body)
            log.emit(_line(f"{step.index} {next(IDS) >= 0} {_is_untouched()}"))
            if session.rank in {0, session.world_size - 1}:
                name = "last" if session.rank else "first"
                draft = places[1] / f"{name}.draft"
                torch.save({"step": step.index}, draft)
                draft.replace(places[1] / f"{name}.pt")
                _append(places[1] / f"{name}.pids", f"{os.getpid()}\n")
            if session.rank == 0:
                _hold(arguments.hold, step.index if step.committed else -1)
    finally:
        _append(places[0] / "ended.log", f"{os.getpid()}\n")
        print("the end of", os.getpid(), flush=True)


def _made(*names: str) -> list[pathlib.Path]:
    """Return directories of these names."""
    for name in names:
        pathlib.Path(name).mkdir(exist_ok=True)
    return [*map(pathlib.Path, names)]


def _fail(way: str | None) -> None:
    if way is not None:
        msg = "it is tired"
        raise FAILURES[way](msg)


def _is_untouched() -> bool:
    """Return whether this process's functions are those that Python came with."""
    names = ("open", "stat", "replace", "scandir", "mkdir", "unlink")
    is_same = all(getattr(os, name) is getattr(posix, name) for name in names)
    return is_same and builtins.open is _io.open and not hasattr(torch.save, "__wrapped__")


def _line(text: str) -> logging.LogRecord:
    return logging.LogRecord("script", logging.INFO, "", 0, text, None, None)


def _append(path: pathlib.Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _hold(hold: list[str] | None, step: int) -> None:
    if hold is not None and step == int(hold[0]):
        while not pathlib.Path(hold[1]).exists():
            time.sleep(0.01)


if __name__ == "__main__":
    main()
