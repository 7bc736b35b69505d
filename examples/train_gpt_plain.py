"""The same model and data as `train_gpt.py`, as people train them today: plain DDP and checkpoints.

    torchrun --nnodes 4 --node-rank N --master-addr A examples/train_gpt_plain.py

Rank 0 saves a checkpoint every few steps. When a node is lost the whole job is started again and
goes on from the last one. `tmover demo` measures how long that takes; this file is its other side.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from train_gpt import GPT, Source, arguments, backward, share_of_lr


def batches(
    loader: DataLoader[tuple[Tensor, Tensor]],
    sampler: DistributedSampler[tuple[Tensor, Tensor]],
    first: int,
) -> Iterator[list[Tensor]]:
    """Yield the batches of pass after pass, from the batch of step `first` on."""
    data_pass, skip = divmod(first, len(loader))
    while True:
        sampler.set_epoch(data_pass)
        for n, batch in enumerate(loader):
            if n >= skip:
                yield batch
        data_pass, skip = data_pass + 1, 0


def save(
    file: pathlib.Path, step: int, parts: dict[str, nn.Module | torch.optim.Optimizer]
) -> None:
    """Write a checkpoint beside the last one, then put it in its place."""
    beside = file.with_suffix(".new")
    torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, beside)
    beside.replace(file)


def main() -> None:
    parser = arguments()
    parser.set_defaults(checkpoint=pathlib.Path("checkpoint.pt"))
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    parser.add_argument("--trace", type=pathlib.Path, help="where rank 0 notes when a step ended")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: share_of_lr(k, args.steps))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = 0
    if args.checkpoint.exists():
        checkpoint = torch.load(args.checkpoint)
        first = checkpoint["step"] + 1
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])

    data = Source()
    sampler = DistributedSampler(data, seed=args.seed, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed + 1 + rank)

    trace = args.trace.open("a") if args.trace and rank == 0 else None
    for step, batch in zip(range(first, args.steps), batches(loader, sampler, first), strict=False):
        backward(model, batch, args.accumulate)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if trace:
            line = {"t": time.monotonic(), "event": "committed", "rank": 0, "step": step}
            trace.write(json.dumps(line | {"pid": os.getpid()}) + "\n")
            trace.flush()
        if rank == 0 and (step + 1) % args.every == 0:
            save(args.checkpoint, step, parts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
