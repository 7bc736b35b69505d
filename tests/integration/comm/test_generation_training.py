"""DDP and FSDP go on with the same bits over communicators that were exchanged under them."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import threading
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from integration.comm.harness import Board, Program, leave, make_plan, run, uid_of
from integration.comm.stocked import (
    NEW,
    OLD,
    cross,
    enter,
    inner_of,
    run_members,
    standby,
    stocked,
)
from tmover.comm import intercept
from tmover.comm.fabric import Fabric, Mode
from tmover.errors import Interrupted, LinkError

STEPS, SWITCH_AT = 8, 4


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

    def hand_over(self, source: int) -> None:
        for tensor in self.state():
            dist.broadcast(tensor, source)


def digest(tensors: list[torch.Tensor]) -> str:
    """Return the bits of tensors, in short."""
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def _die(_grad: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(trainer: Trainer, first: int, end: int) -> None:
    for step in range(first, end):
        assert trainer.attempt(step)


def start(board: Board, name: str, names: list[str]) -> tuple[Fabric, Trainer]:
    """Return a member of the first world, and its training."""
    fabric = stocked(board, name)
    fabric.form(make_plan(board, 1, names), timeout_s=10)
    intercept.install(fabric)
    return fabric, Trainer(fabric)


def rehearse(board: Board, size: int) -> tuple[Fabric, Trainer]:
    """Return a standby for rank 1, and what it has rehearsed."""
    fabric = stocked(board, "s0")
    fabric.rehearse(1, size)
    intercept.install(fabric)
    trainer = Trainer(fabric)
    train(trainer, 0, 3)
    return fabric, trainer


def finish(fabric: Fabric, trainer: Trainer) -> str:
    """Train to the end, and return the bits."""
    train(trainer, SWITCH_AT, STEPS)
    fabric.exchange(b"done")
    leave(fabric)
    return digest(trainer.state())


@functools.cache
def undisturbed(size: int) -> str:
    """Return the bits of a training in which nothing happens."""
    names = [f"n{rank}" for rank in range(size)]

    def member(board: Board, name: str) -> str:
        fabric, trainer = start(board, name, names)
        train(trainer, 0, SWITCH_AT)
        return finish(fabric, trainer)

    found = run({name: functools.partial(member, name=name) for name in names})
    (bits,) = {outcome.value for outcome in found.values()}
    return str(bits)


# --- a planned move -------------------------------------------------------------------------------


def make_groups() -> list[Any]:
    """Return the groups this rank is in: of all, and of each pair; the first without the leaver."""
    pairs = [dist.new_group(pair) for pair in ([0, 2], [0, 1], [1, 2])]
    return [pair for pair in pairs if dist.get_rank(pair) >= 0]


def use(groups: list[Any]) -> None:
    for group in groups:
        row = torch.ones(1)
        dist.all_reduce(row, group=group)
        assert row.item() in (1, 2)


def mover(board: Board, name: str) -> Any:
    fabric, trainer = start(board, name, OLD)
    groups = make_groups()
    use(groups)
    train(trainer, 0, SWITCH_AT - 1)
    plan = make_plan(board, 2, NEW)
    thread = threading.Thread(target=fabric.prepare, args=(plan,), kwargs={"timeout_s": 20})
    thread.start()
    train(trainer, SWITCH_AT - 1, SWITCH_AT)
    use(groups)
    board.put(f"trained/{name}")
    before = [inner_of(fabric, group) for group in (None, *groups)]
    thread.join()
    if name == "n1":
        board.get("passed/n0")
        board.get("passed/n2")
        leave(fabric)
        return None
    enter(fabric, 2)
    board.put(f"passed/{name}")
    after = [inner_of(fabric, group) for group in (None, *groups)]
    built = [inner.communicator is not None for inner in after]
    trainer.hand_over(0)
    use(groups)
    fabric.release(2)
    same = [a is b for a, b in zip(before, after, strict=True)]
    return finish(fabric, trainer), same, built


def moved(board: Board) -> Any:
    fabric, trainer = rehearse(board, 3)
    groups = make_groups()
    use(groups)
    for name in OLD:
        board.get(f"trained/{name}")
    cross(fabric, board, 2, NEW)
    trainer.hand_over(0)
    use(groups)
    return finish(fabric, trainer)


def test_a_move_builds_what_the_leaver_was_in_while_training_goes_on_and_keeps_the_rest() -> None:
    """The joiner begins to prepare only after a whole step was done beside what is prepared."""
    programs: dict[str, Program] = {name: functools.partial(mover, name=name) for name in OLD}

    found = {name: out.value for name, out in run({**programs, "s0": moved}).items()}

    bits = undisturbed(3)
    assert found["s0"] == bits
    for name in ("n0", "n2"):  # of all, of 0 and 2, and the pair with the leaver
        assert found[name] == (bits, [False, True, False], [True, True, True])


# --- a failure ------------------------------------------------------------------------------------

FOUR, FOUR_AFTER = ["n0", "n1", "n2", "n3"], ["n0", "s0", "n2", "n3"]


def survivor(board: Board, name: str) -> Any:
    """Train until rank 1 dies in its backward, and go on with the standby."""
    fabric, trainer = start(board, name, FOUR)
    accused: list[tuple[str, ...]] = []
    fabric.on_broken = lambda _epoch, peers, _reason: accused.append(peers)
    others = dist.new_group([0, 2, 3])
    if name != "n1":
        dist.barrier(others)
    train(trainer, 0, SWITCH_AT)
    before = [inner_of(fabric), inner_of(fabric, others) if name != "n1" else None]
    assert not trainer.attempt(SWITCH_AT, die=name == "n1")
    assert fabric.mode is Mode.REVOKED
    cross(fabric, board, 2, FOUR_AFTER)
    fabric.release(2)
    after = [inner_of(fabric), inner_of(fabric, others)]
    kept = [a is b for a, b in zip(before, after, strict=True)]
    trainer.hand_over(0)
    dist.barrier(others)
    return finish(fabric, trainer), kept, [peers for peers in accused if peers]


def successor(board: Board) -> Any:
    fabric, trainer = rehearse(board, 4)
    assert dist.new_group([0, 2, 3]) is not None
    cross(fabric, board, 2, FOUR_AFTER)
    trainer.hand_over(0)
    return finish(fabric, trainer)


def test_a_death_inside_backward_ends_every_collective_at_once_and_keeps_the_bits() -> None:
    """Rank 3 has no connection to the dead rank 1 that it waits for, and would wait half an hour.

    That is gloo's timeout; this test's is far shorter.
    """
    programs: dict[str, Program] = {name: functools.partial(survivor, name=name) for name in FOUR}

    found = run({**programs, "s0": successor}, deadline_s=60)

    bits = undisturbed(4)
    assert found["n1"].status == -signal.SIGKILL
    assert found["s0"].value == bits
    for name in ("n0", "n2", "n3"):
        theirs, kept, accused = found[name].value
        assert (theirs, kept) == (bits, [False, False])
        assert accused in ([], [(uid_of("n1"),)])


# --- FSDP -----------------------------------------------------------------------------------------


class Sharded:
    """A model whose every rank has its own part."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(32, 32) for _ in range(3)]
        self.model: Any = nn.Sequential(*layers)
        for layer in layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, first: int, end: int) -> None:
        for step in range(first, end):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 32, generator=generator)).square().mean().backward()
            self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        found = []
        for parameter in self.model.parameters():
            kept = self.optimizer.state[parameter]
            found += [parameter.to_local().data, kept["step"]]
            found += [kept[name].to_local() for name in ("exp_avg", "exp_avg_sq")]
        return found


def shard_holder(fabric: Fabric, board: Board, name: str) -> str | None:
    sharded = Sharded()
    sharded.train(0, 3)
    if board.get("move"):
        fabric.prepare(make_plan(board, 2, NEW), timeout_s=20)
        if name == "n1":
            board.put("shards", [tensor.numpy().copy() for tensor in sharded.state()])
            board.get("passed/n0")
            board.get("passed/n2")
            return None
        enter(fabric, 2)
        board.put(f"passed/{name}")
        fabric.release(2)
    sharded.train(3, 6)
    fabric.exchange(b"done")
    return digest(sharded.state())


def shard_taker(board: Board) -> str:
    fabric = standby(board)
    sharded = Sharded()
    sharded.train(0, 3)
    board.put("move", value=True)
    cross(fabric, board, 2, NEW)
    for own, taken in zip(sharded.state(), board.get("shards"), strict=True):
        own.copy_(torch.from_numpy(taken))
    sharded.train(3, 6)
    fabric.exchange(b"done")
    leave(fabric)
    return digest(sharded.state())


def stay(board: Board) -> None:
    board.put("move", value=False)


def test_fsdp_goes_on_with_the_same_bits() -> None:
    plain = run_members(shard_holder, {"nobody": stay}, deadline_s=60)
    moved = run_members(shard_holder, {"s0": shard_taker}, deadline_s=60)

    assert [moved[name].value for name in NEW] == [plain[name].value for name in OLD]
