"""DDP goes on with the same bits when a rank changes hands, planned or after a death."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from integration.comm.harness import Board, Program, make_fabric, make_plan, run
from tmover.comm import intercept
from tmover.comm.fabric import Fabric, Mode
from tmover.errors import Interrupted, LinkError

STEPS = 8
SWITCH_AT = 4


class Trainer:
    """A model under DDP, and a step that is voted on."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64) for _ in range(4)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def attempt(self, step: int, *, die: bool = False) -> bool:
        """Compute gradients and vote; return whether the update was applied."""
        self.fabric.attempt_open = True
        try:
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            batch = torch.randn(16, 64, generator=generator)
            self.optimizer.zero_grad()
            if die:
                hook = self.model.module[2].weight.register_hook(_die)
                assert hook is not None
            self.model(batch).square().mean().backward()
            self.fabric.exchange(b"good")
        except (LinkError, Interrupted):
            return False
        finally:
            self.fabric.quiesce()
            self.fabric.attempt_open = False
        self.optimizer.step()
        return True

    def state(self) -> list[torch.Tensor]:
        tensors = [p.data for p in self.model.parameters()]
        for parameter in self.model.parameters():
            kept = self.optimizer.state[parameter]
            tensors += [kept["exp_avg"], kept["exp_avg_sq"], kept["step"]]
        return tensors

    def digest(self) -> str:
        made = hashlib.sha256()
        for tensor in self.state():
            made.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return made.hexdigest()

    def hand_over(self, source: int) -> None:
        for tensor in self.state():
            dist.broadcast(tensor, source)


def _die(_grad: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _member(board: Board, name: str, names: list[str], scenario: str) -> Any:
    fabric = make_fabric(board, name)
    fabric.form(make_plan(board, 1, names), timeout_s=5)
    intercept.install(fabric)
    broken: list[tuple[int, tuple[str, ...]]] = []
    fabric.on_broken = lambda epoch, peers, _reason: broken.append((epoch, peers))
    trainer = Trainer(fabric)
    opened = fabric.links_opened
    step = 0
    while step < STEPS:
        if step == SWITCH_AT and fabric.epoch == 1 and scenario == "planned":
            plan = make_plan(board, 2, ["n0", "s0", "n2"])
            if name == "n1":
                board.get("ready")
                fabric.close(bye=True)
                return None
            fabric.prepare(plan, timeout_s=5)
            board.put("ready")
            fabric.barrier(2)
            fabric.commit(2)
            fabric.release(2)
            trainer.hand_over(0)
        die = scenario == "kill" and name == "n1" and step == SWITCH_AT
        if trainer.attempt(step, die=die):
            step += 1
        else:
            assert fabric.mode is Mode.REVOKED
            fabric.prepare(make_plan(board, 2, ["n0", "s0", "n2"]), timeout_s=5)
            fabric.barrier(2)
            fabric.commit(2)
            fabric.release(2)
            trainer.hand_over(0)
    digest = trainer.digest()
    fabric.exchange(b"done")
    found = {"digest": digest, "opened": fabric.links_opened - opened, "broken": broken}
    intercept.uninstall()
    fabric.close(bye=True)
    return found


def _joiner(board: Board) -> Any:
    fabric = make_fabric(board, "s0")
    fabric.rehearse(1, 3)
    intercept.install(fabric)
    trainer = Trainer(fabric)
    for step in range(3):
        assert trainer.attempt(step)
    fabric.prepare(make_plan(board, 2, ["n0", "s0", "n2"]), timeout_s=20)
    fabric.barrier(2)
    fabric.commit(2)
    trainer.hand_over(0)
    for step in range(SWITCH_AT, STEPS):
        assert trainer.attempt(step)
    digest = trainer.digest()
    fabric.exchange(b"done")
    intercept.uninstall()
    fabric.close(bye=True)
    return {"digest": digest}


def _run(scenario: str) -> dict[str, Any]:
    names = ["n0", "n1", "n2"]
    programs: dict[str, Program] = {
        name: functools.partial(_member, name=name, names=names, scenario=scenario)
        for name in names
    }
    if scenario != "undisturbed":
        programs["s0"] = _joiner
    return {name: outcome.value for name, outcome in run(programs).items()}


@functools.cache
def undisturbed() -> str:
    digests = {found["digest"] for found in _run("undisturbed").values()}
    assert len(digests) == 1
    digest: str = digests.pop()
    return digest


def test_a_planned_swap_keeps_the_bits_and_opens_links_to_the_joiner_only() -> None:
    found = _run("planned")

    assert {found[name]["digest"] for name in ("n0", "s0", "n2")} == {undisturbed()}
    assert {found[name]["opened"] for name in ("n0", "n2")} == {3}
    assert [found[name]["broken"] for name in ("n0", "n2")] == [[], []]


def test_a_death_inside_backward_keeps_the_bits() -> None:
    found = _run("kill")

    assert {found[name]["digest"] for name in ("n0", "s0", "n2")} == {undisturbed()}
    assert {found[name]["opened"] for name in ("n0", "n2")} == {3}
    assert found["n1"] is None
    assert all(found[name]["broken"] in ([], [(1, ("n1-0000/0",))]) for name in ("n0", "n2"))
