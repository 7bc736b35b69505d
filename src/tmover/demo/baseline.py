"""What people do today, measured: plain DDP under torchrun, started again from its last checkpoint.

The nodes are those of the local scheduler, killed in the same way as in a moved job. The whole job
is started again at once: no queue, no health check, no node to wait for, files in the page cache.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable

from tmover.demo import measure
from tmover.demo.report import Restart
from tmover.demo.trace import Line, parse
from tmover.errors import SchedulerError
from tmover.scheduler.local import LocalScheduler

_JOB = "plain"
_EVERY = 10
"""Steps from checkpoint to checkpoint."""
_POLL_S = 0.02
_STEP_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Plain:
    """A plain job on `nodes`, one rank each, with its files in `folder`."""

    scheduler: LocalScheduler
    nodes: list[str]
    script: pathlib.Path
    folder: pathlib.Path

    def start(self) -> None:
        """Start a torchrun on every node."""
        port = _free_port(self._address(self.nodes[0]))
        scratch = self.folder / "tmp"  # a torchrun that is killed leaves files
        scratch.mkdir(exist_ok=True)
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(scratch)}
        for n, node in enumerate(self.nodes):
            self.scheduler.start(
                node,
                self._argv(n, port),
                env={**os.environ, **env},
                job=_JOB,
                log=self.folder / f"{node}.log",
            )

    def kill(self) -> float:
        """Kill the node with rank 0, then end the others; return when rank 0 was dead."""
        at = self.scheduler.fail(self.nodes[0])
        for node in self.nodes[1:]:
            self.scheduler.end(node, "the job is started again")
        self.scheduler.resume(self.nodes[0])
        return at

    def lines(self) -> list[Line]:
        """Return what rank 0 has written so far, in all of its lives."""
        file = self.folder / "trace.jsonl"
        return parse(file.read_bytes()) if file.exists() else []

    def last_step(self) -> int:
        """Return the highest step that has ended, -1 before the first."""
        return max((line.step for line in self.lines() if line.step is not None), default=-1)

    def wait_for(self, step: int) -> None:
        """Wait until `step` has ended. Raises `SchedulerError` with rank 0's log if it does not."""
        deadline = time.monotonic() + _STEP_TIMEOUT_S
        while not any(line.step == step for line in self.lines()):
            log = self.folder / f"{self.nodes[0]}.log"
            ended = self.nodes[0] not in self.scheduler.running(_JOB)
            if ended or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
                msg = f"the plain job did not come to step {step}; the end of {log}:\n{tail}"
                raise SchedulerError(msg)
            time.sleep(_POLL_S)

    def _address(self, node: str) -> str:
        return next(info.address for info in self.scheduler.nodes() if info.name == node)

    def _argv(self, node_rank: int, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(self.nodes)), "--node-rank", str(node_rank)),
            *("--nproc-per-node", "1"),
            *("--master-addr", self._address(self.nodes[0]), "--master-port", str(port)),
            *(str(self.script), "--steps", "1000000", "--every", str(_EVERY)),
            *("--checkpoint", str(self.folder / "checkpoint.pt")),
            *("--trace", str(self.folder / "trace.jsonl")),
        ]


def measure_restarts(
    script: pathlib.Path,
    folder: pathlib.Path,
    *,
    world: int,
    kills: int,
    say: Callable[[str], None],
) -> list[Restart]:
    """Train; `kills` times, halfway between two checkpoints, kill rank 0's node and start again."""
    scheduler = LocalScheduler(folder / "cluster", capacity=world)
    plain = Plain(scheduler, scheduler.claim(_JOB, world), script, folder)
    killed: list[float] = []
    try:
        say("plain DDP under torchrun: starting")
        plain.start()
        for n in range(kills):
            plain.wait_for(_halfway_after(plain.last_step()))
            say(f"plain DDP: rank 0's node killed, whole job started again ({n + 1} of {kills})")
            killed.append(plain.kill())
            plain.start()
            plain.wait_for(plain.last_step() + 1)
    finally:
        scheduler.release(_JOB)
    lines = plain.lines()
    ends = [*killed[1:], float("inf")]
    return [
        measure.restart([line for line in lines if line.t <= end], killed_at=at)
        for at, end in zip(killed, ends, strict=True)
    ]


def _halfway_after(step: int) -> int:
    """Return the next step halfway between two checkpoints, after the first checkpoint.

    >>> [_halfway_after(step) for step in (-1, 13, 14, 20)]
    [14, 14, 24, 24]
    """
    halfway = _EVERY // 2 - 1
    return max(1, (step - halfway) // _EVERY + 1) * _EVERY + halfway


def _free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])
