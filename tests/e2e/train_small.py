"""The script that end-to-end tests run: everything a real one has, in a few milliseconds a step.

Dropout, per-rank random streams, BatchNorm (whose running statistics differ by rank), AdamW, a
scheduler, a shuffled loader with random augmentation. `--hold STEP FILE` makes rank 0 wait, after
that step, until the file exists. `--codes` adds a buffer that moves through `.data`; `--late` has
an averaged model, and what each rank counts for itself, change after `optimizer.step()`. `--save`
names a directory for the checkpoints that are asked for: one file for each rank and step. `--slow
RANK SECONDS` makes a rank take so much longer for every step. `--cut-at STEP` breaks what gloo has
connected on rank 0, in every attempt at that step. `--overflow STEP` scales the loss, and lets it
overflow in that step, whose update is skipped. `--micro` adds up the gradients of so many parts of
a batch, and reduces those of the last one only. `--apart` broadcasts no buffers: each rank keeps
its own running statistics. `--dice` adds noise from generators of its own, which it tracks.
`--checkpoint` names a directory, and after how many steps a checkpoint goes there. `--alone STEP`
lets each rank train for itself from that step on.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import pathlib
import random
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tmover
from tmover.comm.stock import Gloo


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are augmented at random, by all three sources of random numbers."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator)
        x = x + 0.1 * torch.randn(16) + random.random() + float(np.random.random())
        return x, x.sum().sin().view(1)


class Codes(nn.Module):
    """Shifts by an average of what it has seen, which moves uncounted, as quantizers' codes do."""

    codes: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.data.mul_(0.9).add_(x.detach().mean(dim=0), alpha=0.1)
        return x + self.codes.clone()


class Count:
    """What one rank counts for itself."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class Dice:
    """A script's own random generators."""

    def __init__(self, seed: int) -> None:
        self.mine = torch.Generator().manual_seed(seed)
        self.numpys = np.random.default_rng(seed)

    def shake(self, batch: Any) -> Any:
        x, y = batch
        noise = torch.randn(x.shape, generator=self.mine) + self.numpys.normal()
        return x + 0.1 * noise, y


def build(hidden: int, *, codes: bool) -> nn.Module:
    return nn.Sequential(
        Codes(16) if codes else nn.Identity(),
        nn.Linear(16, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 1),
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--dice", action="store_true")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--hold", nargs=2, default=None)
    parser.add_argument("--codes", action="store_true")
    parser.add_argument("--late", nargs="*", default=[], choices=["average", "whole", "count"])
    parser.add_argument("--save", type=pathlib.Path, default=None)
    parser.add_argument("--checkpoint", nargs=2, default=None)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--cut-at", type=int, default=-1)
    parser.add_argument("--overflow", type=int, default=None)
    parser.add_argument("--alone", type=int, default=1 << 30)
    parser.add_argument("--slow", nargs=2, type=float, default=[-1, 0])
    return parser.parse_args()


def main() -> None:
    arguments, session = parsed(), tmover.init(seed=7)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        build(arguments.hidden, codes=arguments.codes), broadcast_buffers=not arguments.apart
    )
    _seed(session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    dataset = Noisy()
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(
        dataset, num_replicas=session.world_size, rank=session.rank
    )
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=arguments.workers)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)
    averages, count = _averages(model.module), Count()
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=4.0, growth_interval=3, enabled=arguments.overflow is not None
    )
    session.track(scaler=scaler, **_late(arguments.late, averages, count))
    _save(session, arguments.checkpoint)
    dice = _dice(session) if arguments.dice else None

    for step in session.steps(loader, total=arguments.steps):
        with step:
            _fail(arguments.fail_at, step.index, sandbox=session.sandbox)
            _cut(arguments.cut_at, step.index, session.rank)
            batch = _slowly(dice.shake(step.batch) if dice else step.batch, arguments, session)
            factor = 1e30 if step.index == arguments.overflow else 1.0
            mine = model.module if step.index >= arguments.alone else model
            loss = _backward(mine, batch, scaler, arguments.micro, factor)
            scaler.step(optimizer)
            scaler.update()
            _average(averages, model.module)
            count.losses.append(loss.item())
            scheduler.step()
            optimizer.zero_grad()
        if step.committed and step.checkpoint_requested and arguments.save is not None:
            torch.save(model.state_dict(), arguments.save / f"{step.index}-{session.rank}")
        if step.committed and session.rank == 0:
            print("step", step.index, loss.item(), flush=True)
            _hold(arguments.hold, step.index)

    for last in session.final():
        with last:
            total = torch.tensor([float(session.rank)])
            torch.distributed.all_reduce(total)
            assert last.index == arguments.steps
        if last.committed and session.rank == 0:
            print("sum of ranks", total.item(), flush=True)


def _backward(
    model: Any,
    batch: Any,
    scaler: torch.amp.GradScaler,
    micro: int,
    factor: float,
) -> torch.Tensor:
    """Add up the gradients of a batch in parts; return the last part's loss."""
    loss = torch.zeros(())
    parts = zip(*(each.chunk(micro) for each in batch), strict=True)
    for number, (x, y) in enumerate(parts, start=1):
        with contextlib.nullcontext() if number == micro else model.no_sync():
            noise = 0.01 * (random.random() + float(np.random.random()))
            loss = nn.functional.mse_loss(model(x + noise), y)
            scaler.scale(factor * factor * loss / micro).backward()  # type: ignore[no-untyped-call]
    return loss


def _fail(at: int, index: int, *, sandbox: bool) -> None:
    if index == at and not sandbox:
        msg = "the script's own error"
        raise ValueError(msg)


def _averages(model: nn.Module) -> dict[str, AveragedModel]:
    """Return an average of one layer, and one of everything, BatchNorm's statistics too."""
    return {
        "average": AveragedModel(model.get_submodule("1")),
        "whole": AveragedModel(model, use_buffers=True),
    }


def _average(averages: dict[str, AveragedModel], model: nn.Module) -> None:
    averages["average"].update_parameters(model.get_submodule("1"))
    averages["whole"].update_parameters(model)


def _late(names: list[str], averages: dict[str, AveragedModel], count: Count) -> dict[str, Any]:
    """Return what is to be tracked of what changes after the update."""
    own = {"per_rank": {"count": count}} if "count" in names else {}
    return {**{name: averages[name] for name in names if name in averages}, **own}


def _save(session: tmover.Session, where: list[str] | None) -> None:
    if where is not None:
        session.checkpoint(where[0], every=int(where[1]))


def _dice(session: tmover.Session) -> Dice:
    dice = Dice(400 + session.rank)
    session.track(mine=dice.mine, numpys=dice.numpys)
    return dice


def _seed(rank: int) -> None:
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)


def _slowly(batch: Any, arguments: argparse.Namespace, session: tmover.Session) -> Any:
    if session.rank == arguments.slow[0]:
        time.sleep(arguments.slow[1])
    return batch


def _cut(at: int, index: int, rank: int) -> None:
    for found in gc.get_objects() if (index, rank) == (at, 0) else ():
        if isinstance(found, Gloo):
            found.abort()


def _hold(hold: list[str] | None, index: int) -> None:
    if hold is not None and index == int(hold[0]):
        while not pathlib.Path(hold[1]).exists():
            time.sleep(0.005)


main()
