"""The script of end-to-end tests that checks what other ranks say, and stops if it is not right.

Each node has two ranks. In each step tokens are exchanged among all ranks, as many as their values
say (uneven `all_to_all`); a value is added up inside the node; the gradients, the loss and a count
go over all. Batches have to be whole, gradients finite, and the loss near the last one. What was
received is printed as a digest, also in a rehearsal.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import random
import time
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tmover
from tmover.comm.group import TmoverGroup
from tmover.memory import view

ROWS = 4
WIDTH = 8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hold", nargs=2, default=None)
    return parser.parse_args()


def digest(*tensors: torch.Tensor) -> str:
    joined = b"".join(bytes(view(tensor.detach().contiguous())) for tensor in tensors)
    return hashlib.sha256(joined).hexdigest()[:16]


def route(x: torch.Tensor) -> list[torch.Tensor]:
    """Send each row to the rank that its values say, get it back doubled; return what came."""
    size = dist.get_world_size()
    to = (x[:, 0].abs() * 100).long() % size
    ordered = x[to.argsort(stable=True)]
    counts = torch.bincount(to, minlength=size)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts)
    mine = torch.empty(int(incoming.sum()), x.shape[1])
    dist.all_to_all_single(mine, ordered, incoming.tolist(), counts.tolist())
    total = torch.tensor(len(mine))
    dist.all_reduce(total)
    if total != ROWS * size:
        fail(f"{total} tokens of {ROWS * size}: some are lost")
    return [incoming, mine, total]


def fail(why: str) -> NoReturn:
    raise RuntimeError(why)


def add_up(rank: int, node: Any) -> float:
    """Return the sum of the ranks of a node."""
    value = torch.tensor(float(rank))
    dist.all_reduce(value, group=node)
    return value.item()


def reduce_gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Average the gradients over all ranks; return copies of them."""
    loss.backward()  # type: ignore[no-untyped-call] # torch has none here
    seen = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        seen.append(parameter.grad.clone())
        if not torch.isfinite(parameter.grad).all():
            fail("a gradient is not finite")
    return seen


def path() -> str:
    """Return where a collective begins: in the group's own code, or in what records it."""
    return pathlib.Path(TmoverGroup._start.__code__.co_filename).stem


def main() -> None:
    arguments = parse()
    session = tmover.init(seed=7)
    rank, size = session.rank, session.world_size
    nodes = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    names = ["the run's name" if rank == 0 else None]
    dist.broadcast_object_list(names, src=0)
    if names[0] != "the run's name":
        fail("the run has no name")
    torch.manual_seed(0)
    random.seed(rank)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(data, data.sum(1, keepdim=True))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=size, rank=rank)
    loader = DataLoader(dataset, batch_size=ROWS, sampler=sampler)
    session.track(model=model, optimizer=optimizer)
    last = 0.0

    for step in session.steps(loader, total=arguments.steps):
        with step:
            x, y = step.batch
            seen = route(x)
            inside = add_up(rank, nodes[rank // 2])
            loss = nn.functional.mse_loss(model(x), y)
            seen += reduce_gradients(model, loss)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            seen.append(mean)
            if last and not last / 20 < mean < last * 20:
                fail(f"the loss jumps from {last} to {mean}")
            last = mean.item()
            optimizer.step()
            optimizer.zero_grad()
        if session.sandbox or step.committed:
            where = "rehearsed" if session.sandbox else "trained"
            print("saw", where, rank, step.index, inside, digest(*seen), path(), flush=True)
        if step.committed and rank == 0 and arguments.hold is not None:
            while step.index == int(arguments.hold[0]) and not _is_open(arguments.hold[1]):
                time.sleep(0.005)


def _is_open(gate: str) -> bool:
    return pathlib.Path(gate).exists()


main()
