"""The script of `ablation.py`: the model of `examples/train_gpt.py`, its gradients reduced by hand.

Without DDP, whose buckets need a rehearsal: so a standby can also be one that has computed nothing.
With `--cold` it is: process, imports, model and loader are there, and its shadow steps are empty.
With `--compile` the model is compiled, into a cache of the process's own, as on a node of its own.
While there is a file `rest` in `--folder`, ranks rest between steps: the cores are for those that
start. What a step took of a core goes into the file `cpu` there, by rank.
"""

from __future__ import annotations

import argparse
import atexit
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

WIDTH, LAYERS, BATCH = 192, 1, 80
"""A step of some 130 ms: what the scheduler of a small machine does in one is not much of it."""
LINGER_S = 1.0
"""A leaver ends on a node of its own; here it would do so in the joiner's first steps."""
_REST_S = 0.2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rest, cpu = args.folder / "rest", args.folder / "cpu"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")

    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    import tmover
    from train_gpt import GPT, Source

    session = tmover.init(seed=1)
    torch.manual_seed(1)
    model = GPT(width=WIDTH, layers=LAYERS)
    forward = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.track(model=model, optimizer=optimizer)
    data = Source()
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=1, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    torch.manual_seed(2 + session.rank)
    atexit.register(time.sleep, LINGER_S)
    for step in session.steps(loader, total=args.steps):
        if not session.sandbox and rest.exists():
            time.sleep(_REST_S)
        began = time.process_time()
        with step:
            if not (args.cold and session.sandbox):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = forward(*step.batch)
                loss.backward()
                average(list(model.parameters()), session.world_size)
                optimizer.step()
                optimizer.zero_grad()
        if step.committed:
            note(cpu, f"{session.rank} {step.index} {time.process_time() - began:.6f}")


def note(path: pathlib.Path, line: str) -> None:
    """Append a line in one write, as others do at the same time."""
    with path.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def average(parameters: list[Any], world_size: int) -> None:
    """Replace each gradient by its mean over all ranks."""
    import torch
    from torch import distributed as dist

    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= world_size
    parts = torch.split(flat, [grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))


main()
