"""The job of `bench/steps.py`: one model, trained in turns under tmover and as plain DDP on gloo.

Each rank holds the model twice. A block of steps under tmover, over its links, with its snapshot,
vote and keeper, is followed by as many steps of plain DDP over a stock gloo group between the same
processes, and by a block under tmover whose records go to no keeper. So whatever else the machine
does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import tmover
from tmover.worker import bootstrap

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

from ranks import stock_group
from train_gpt import GPT, Source, backward, share_of_lr

TMOVER, GLOO, ALONE = "tmover", "gloo", "without keeper"
_SEED = 1


class Size(NamedTuple):
    """A model, and how many windows of text a rank reads per step."""

    width: int
    layers: int
    heads: int
    batch: int


SIZES = {
    "demo": Size(width=96, layers=4, heads=4, batch=4),
    "50m": Size(width=768, layers=7, heads=12, batch=2),
    "tiny": Size(width=16, layers=1, heads=2, batch=2),
}


class Training:
    """One copy of the model, and what an ordinary script does with a batch."""

    def __init__(self, size: Size, total: int, group: dist.ProcessGroup | None = None) -> None:
        torch.manual_seed(_SEED)
        inner = GPT(width=size.width, layers=size.layers, heads=size.heads)
        self.model = DistributedDataParallel(inner, process_group=group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: share_of_lr(step, total)
        )

    def step(self, batch: Any) -> None:
        backward(self.model, batch, 1)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def loader_of(size: Size) -> DataLoader[Any]:
    data = Source()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=_SEED, drop_last=True)
    return DataLoader(data, batch_size=size.batch, sampler=sampler, drop_last=True)


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of a block")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of this run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    session = tmover.init()
    total = 2 * args.rounds * args.steps
    store = dist.FileStore(str(args.folder / "store"), session.world_size)
    group = stock_group(store, session.rank, session.world_size)
    under_tmover = moved(session, SIZES[args.size], total)
    blocks = {
        TMOVER: under_tmover,
        GLOO: plain(group, SIZES[args.size], total),
        ALONE: _without_keeper(under_tmover),
    }
    times: dict[str, list[list[float]]] = {name: [] for name in blocks}
    for number in range(args.rounds):
        order = list(blocks) if number % 2 == 0 else list(reversed(blocks))
        for name in order:
            times[name].append([_timed(blocks[name]) for _ in range(args.steps)])
    if session.rank == 0:
        (args.folder / "report.json").write_text(json.dumps(times))


def moved(session: tmover.Session, size: Size, total: int) -> Callable[[], None]:
    """Return a step under tmover, to be called `total` times."""
    training = Training(size, total)
    session.track(model=training.model, optimizer=training.optimizer, scheduler=training.scheduler)
    steps = session.steps(loader_of(size), total=total)

    def under_tmover() -> None:
        step = next(steps)
        with step:
            training.step(step.batch)
        if not step.committed:
            msg = f"step {step.index} was not committed: nothing that is measured here is lost"
            raise SystemExit(msg)
        if step.index == total - 1:
            next(steps, None)  # the end of the loop

    return under_tmover


def plain(group: dist.ProcessGroup, size: Size, total: int) -> Callable[[], None]:
    """Return a step of plain DDP over a group."""
    training = Training(size, total, group)
    batches = endless(loader_of(size))
    return lambda: training.step(next(batches))


def _without_keeper(step: Callable[[], None]) -> Callable[[], None]:
    """Return `step` with the records staying where they are: what a keeper costs is the rest."""
    runtime = bootstrap.current()

    def alone() -> None:
        setattr(runtime, "hand_record_on", lambda _record, epoch=None: b"")  # noqa: B010
        step()
        delattr(runtime, "hand_record_on")

    return alone


def _timed(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
