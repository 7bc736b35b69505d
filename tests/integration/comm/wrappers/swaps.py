"""Trainings over forked ranks: undisturbed, with a rank that is handed over, with one that dies."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed as dist

from integration.comm.harness import (
    Board,
    Program,
    make_fabric,
    make_plan,
    register,
    run,
    uid_of,
)
from integration.comm.wrappers.links import Change, Look, lanes_of
from integration.comm.wrappers.training import Phase, Training
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.timeouts import Timeouts
from tmover.core.events import Plan

STEPS = 6
SWAP_AT = 3
"""A rank is swapped before this step, or dies in it; a standby has rehearsed as many."""
DEADLINE_S = 90.0
PATIENT = Timeouts(
    collective_s=DEADLINE_S, barrier_s=DEADLINE_S, handshake_s=DEADLINE_S, state_s=DEADLINE_S
)
"""Ranks that compile side by side on few cores are far apart."""


class Swap(NamedTuple):
    """Which rank is swapped; in which phase of a step it dies, if it does."""

    rank: int
    phase: Phase | None = None

    @property
    def joiner(self) -> str:
        """The standby's name: one that dials the others, or one that they dial."""
        return "s0" if self.phase is None else "a0"


class Found(NamedTuple):
    """What one rank ends with."""

    losses: dict[int, float]
    digest: str
    dumped: bytes
    lanes: dict[int, frozenset[Any]]
    """The lanes to each other rank."""
    change: Change | None
    """What the swap has changed in them."""
    broken: list[tuple[int, tuple[str, ...]]]


class Setting(NamedTuple):
    """Which training runs on which fabric, and what happens to it."""

    training: type[Training]
    fabric: str
    swap: Swap | None = None

    @property
    def names(self) -> list[str]:
        """The members at first, by rank."""
        return [f"n{rank}" for rank in range(self.training.size)]

    def next_plan(self, board: Board) -> Plan:
        """Return who the members are after the swap."""
        assert self.swap is not None
        names = self.names
        names[self.swap.rank] = self.swap.joiner
        return make_plan(board, 2, names)

    @property
    def source(self) -> int:
        """Which stayer hands over what all ranks hold."""
        assert self.swap is not None
        return (self.swap.rank + 1) % self.training.size


class Rank:
    """One rank: steps that are voted on."""

    def __init__(self, board: Board, setting: Setting, fabric: Fabric) -> None:
        self.board = board
        self.setting = setting
        self.fabric = fabric
        self.broken: list[tuple[int, tuple[str, ...]]] = []
        fabric.on_broken = lambda epoch, peers, _reason: self.broken.append((epoch, peers))
        register(fabric)
        self.training = setting.training()
        self.losses: dict[int, float] = {}
        self.change: Change | None = None

    def attempt(self, step: int) -> bool:
        """Compute gradients and vote; return whether they were applied.

        Whatever is raised once the world is revoked comes of values that nobody keeps.
        """
        records = self.training.records()
        self.fabric.attempt_open = True
        good = False
        try:
            loss = self.training.step(step)
            self.fabric.exchange(b"good")
            good = True
        except Exception:
            if self.fabric.mode is not Mode.REVOKED:
                raise
        finally:
            self.fabric.quiesce()
            self.fabric.attempt_open = False
        if not good:
            self.training.restore(records)
            return False
        self.training.apply()
        self.losses[step] = loss
        return True

    def enter(self, plan: Plan) -> None:
        """Enter the next world beside all its members."""
        self.fabric.prepare(plan, timeout_s=DEADLINE_S)
        self.fabric.barrier(plan.epoch)
        self.fabric.commit(plan.epoch)

    def finish(self) -> Found:
        """Leave together with the others."""
        found = Found(
            losses=self.losses,
            digest=self.training.digest(),
            dumped=self.training.dump(),
            lanes=lanes_of(self.fabric.present()),
            change=self.change,
            broken=self.broken,
        )
        self.fabric.exchange(b"done")
        self.fabric.close(bye=True)
        return found


class Member(Rank):
    """A rank from the start."""

    def go(self, name: str) -> Found | None:
        swap = self.setting.swap
        leaves = swap is not None and self.setting.names[swap.rank] == name
        step = 0
        while step < STEPS:
            if swap is not None and step == SWAP_AT and self.fabric.epoch == 1:
                look = Look(self.fabric, swap.rank)
                if leaves:
                    self.board.put("held", self.training.dump())
                    if swap.phase is None:
                        self._leave()
                        return None
                    self.training.doom(swap.phase)
                if swap.phase is None or not self.attempt(step):
                    self._stay(look)
                    continue
            assert self.attempt(step)
            step += 1
        return self.finish()

    def _leave(self) -> None:
        """Keep the links until nobody needs them any more."""
        self.board.put("wanted")
        for rank, name in enumerate(self.setting.names):
            if rank != self.fabric.rank:
                self.board.get(f"passed/{name}")
        self.fabric.close(bye=True)

    def _stay(self, look: Look) -> None:
        """Enter the next world, in which one peer is another process."""
        setting = self.setting
        assert setting.swap is not None
        self.board.put("wanted")
        self.board.get("rehearsed")
        self.enter(setting.next_plan(self.board))
        self.change = look.compare(self.fabric)
        self.board.put(f"passed/{setting.names[self.fabric.rank]}")
        self.fabric.release(self.fabric.epoch)
        if setting.training.replicated:
            self.training.share_from(setting.source)


class Joiner(Rank):
    """A standby: rehearses alone, and takes a rank when it is wanted."""

    def go(self) -> Found:
        for step in range(SWAP_AT):
            assert self.attempt(step)
        self.board.put("rehearsed")
        self.board.get("wanted")
        self.enter(self.setting.next_plan(self.board))
        if self.setting.training.replicated:
            self.training.share_from(self.setting.source)
        else:
            self.training.load(self.board.get("held"))
        self.losses.clear()
        for step in range(SWAP_AT, STEPS):
            assert self.attempt(step)
        return self.finish()


def _member(board: Board, name: str, setting: Setting) -> Found | None:
    fabric = make_fabric(board, name, kind=setting.fabric, timeouts=PATIENT)
    fabric.form(make_plan(board, 1, setting.names), timeout_s=DEADLINE_S)
    return Member(board, setting, fabric).go(name)


def _joiner(board: Board, setting: Setting, swap: Swap) -> Found:
    fabric = make_fabric(board, swap.joiner, kind=setting.fabric, timeouts=PATIENT)
    fabric.rehearse(swap.rank, setting.training.size)
    return Joiner(board, setting, fabric).go()


def _run(setting: Setting) -> dict[int, Found]:
    """Return what each rank ends with, whoever holds it in the end."""
    names = setting.names
    programs: dict[str, Program] = {
        name: functools.partial(_member, name=name, setting=setting) for name in names
    }
    if setting.swap is not None:
        programs[setting.swap.joiner] = functools.partial(
            _joiner, setting=setting, swap=setting.swap
        )
        names[setting.swap.rank] = setting.swap.joiner
    outcomes = run(programs, deadline_s=DEADLINE_S)
    return {rank: outcomes[name].value for rank, name in enumerate(names)}


def undisturbed(training: type[Training], fabric: str) -> dict[int, Found]:
    """Return what each rank ends with if nothing happens."""
    return _run_once(Setting(training, fabric))


@functools.cache
def _run_once(setting: Setting) -> dict[int, Found]:
    return _run(setting)


def swapped(training: type[Training], fabric: str, swap: Swap) -> dict[int, Found]:
    """Return what each rank ends with if one is swapped."""
    return _run(Setting(training, fabric, swap))


# --- the same without tmover ----------------------------------------------------------------------


class Plain(NamedTuple):
    """What one rank ends with on torch's own gloo."""

    losses: dict[int, float]
    dumped: bytes


def on_gloo(training: type[Training]) -> dict[int, Plain]:
    """Return what each rank ends with without tmover."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "store"
        programs: dict[str, Program] = {
            str(rank): functools.partial(_plain, training=training, rank=rank, path=path)
            for rank in range(training.size)
        }
        outcomes = run(programs, deadline_s=DEADLINE_S)
    return {int(name): outcome.value for name, outcome in outcomes.items()}


def _plain(_board: Board, training: type[Training], rank: int, path: pathlib.Path) -> Plain:
    store = dist.FileStore(str(path), training.size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=training.size,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    made = training()
    losses = {}
    for step in range(STEPS):
        losses[step] = made.step(step)
        made.apply()
    found = Plain(losses, made.dump())
    dist.barrier()
    return found


def left_by(swap: Swap) -> tuple[str, ...]:
    """Return whom stayers may accuse: the one that dies."""
    return (uid_of(f"n{swap.rank}"),)
