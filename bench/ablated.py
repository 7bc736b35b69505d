"""The script of `ablation.py`: the model of `examples/train_gpt.py`, its gradients reduced by hand.

Without DDP, whose buckets need a rehearsal: so a standby can also be one that has computed nothing.
With `--cold` it is: process, imports, model and loader are there, and its shadow steps are empty.
With `--compile` the model is compiled, into a cache of the process's own, as on a node of its own.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--until", type=pathlib.Path, required=True, help="go on until it is there")
    args = parser.parse_args()
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")

    import torch
    from torch import distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    import tmover
    from train_gpt import GPT, Source

    session = tmover.init(seed=1)
    torch.manual_seed(1)
    model = GPT()
    forward = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.track(model=model, optimizer=optimizer)
    data = Source()
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=1, drop_last=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(2 + session.rank)
    for step in session.steps(loader, total=args.steps):
        with step:
            if not (args.cold and session.sandbox):
                forward(*step.batch).backward()
                parameters = list(model.parameters())
                flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
                dist.all_reduce(flat)
                flat /= session.world_size
                start = 0
                for p in parameters:
                    if p.grad is not None:
                        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
                        start += p.numel()
                optimizer.step()
                optimizer.zero_grad()


main()
