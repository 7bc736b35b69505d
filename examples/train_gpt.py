"""Train a small GPT, byte by byte, on the source of Python's standard library.

    python examples/train_gpt.py                          one process
    torchrun --nproc-per-node 4 examples/train_gpt.py     four, ordinary PyTorch
    tmover run --nproc-per-node 4 examples/train_gpt.py   the same, and ranks can move

All that tmover adds to an ordinary script is `init`, `track` and the two lines of the loop.
Whatever happens to a node meanwhile, the weights at the end are bit for bit the same. With
`--checkpoint FILE` the state is saved when Slurm says that the time limit is near.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import pathlib
import sysconfig
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tmover

CONTEXT = 64


class Source(Dataset[tuple[Tensor, Tensor]]):
    """The standard library's modules as pairs of byte windows, the second one byte later."""

    def __init__(self, limit: int = 4_000_000) -> None:
        files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:limit]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention and a feed-forward layer, each with dropout on its way back into the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed(self.norm2(x)))


class GPT(nn.Module):
    """Predicts the next byte. Its output is the loss."""

    def __init__(
        self, width: int = 96, layers: int = 4, heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        hidden = self.norm(self.blocks(self.byte(x) + self.place(places)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", type=pathlib.Path, help="saved to when one is asked for")
    return parser


def share_of_lr(step: int, total: int, warm_up: int = 50) -> float:
    """Return the learning rate at `step` as a share of the highest: warm-up, then a cosine."""
    progress = (step - warm_up) / max(1, total - warm_up)
    return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * max(0.0, progress)))


def backward(model: DistributedDataParallel, batch: list[Tensor], parts: int) -> float:
    """Add up the gradients of `batch` in `parts` micro-batches; return the mean loss."""
    micro_batches = list(zip(*(half.chunk(parts) for half in batch), strict=True))
    total = 0.0
    for n, (x, y) in enumerate(micro_batches, start=1):
        with contextlib.nullcontext() if n == len(micro_batches) else model.no_sync():
            loss = model(x, y) / len(micro_batches)
            loss.backward()
        total += loss.item()
    return total


def save(path: pathlib.Path, step: int, parts: dict[str, Any]) -> None:
    """Write a checkpoint beside the last one, then put it in its place."""
    new = path.with_name(f".{path.name}.new")
    torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, new)
    new.replace(path)


def main() -> None:
    args = arguments().parse_args()
    session = tmover.init()

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: share_of_lr(k, args.steps))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    session.track(**parts)

    data = Source()
    sampler = DistributedSampler(data, seed=args.seed, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed + 1 + session.rank)  # every rank drops out other units

    for step in session.steps(loader, total=args.steps):
        with step:  # done again, with the same batch and random numbers, if a node is lost in it
            loss = backward(model, step.batch, args.accumulate)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # applied by all ranks or by none
            scheduler.step()
            optimizer.zero_grad()
        if step.committed and session.rank == 0 and step.index % 20 == 0:
            print(f"step {step.index:4}  loss {loss:.3f}", flush=True)
        if step.committed and step.checkpoint_requested and session.rank == 0 and args.checkpoint:
            save(args.checkpoint, step.index, parts)  # `#SBATCH --signal=USR1@120` asks for it


if __name__ == "__main__":
    main()
