"""Real ranks for tests: processes forked from this one, and a board they meet at.

The parent has torch imported and no threads, so a rank starts in milliseconds. It serves the board
until all ranks are gone: `put` publishes a value, `get` waits for one.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection as mpc
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from typing import Any, NamedTuple

import torch
import torch._dynamo  # optimizers and DDP import it: once here, before the ranks fork
from torch import distributed as dist

from tmover.comm import intercept
from tmover.comm.fabric import Fabric
from tmover.comm.timeouts import Timeouts
from tmover.core.events import Member, Plan

torch.set_num_threads(1)
DEADLINE_S = 100.0
SECRET = b"s" * 32
TIMEOUTS = Timeouts(collective_s=20.0, barrier_s=20.0, handshake_s=2.0, state_s=10.0)
FABRICS: dict[str, Callable[..., Fabric]] = {
    "links": Fabric,
    "generation": functools.partial(Fabric, fabric="generation"),
}
"""What may lie under the process groups, by name; tests that compare them take all of these."""


class Board:
    """A rank's end of the board."""

    def __init__(self, pipe: mpc.Connection[Any, Any]) -> None:
        self._pipe = pipe

    def put(self, key: str, value: Any = None) -> None:
        self._pipe.send(("put", key, value))

    def get(self, key: str) -> Any:
        self._pipe.send(("get", key, None))
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()


class Outcome(NamedTuple):
    """How a rank ended: what it returned, or None if it was killed."""

    value: Any
    status: int


Program = Callable[[Board], Any]


def run(programs: Mapping[str, Program], *, deadline_s: float = DEADLINE_S) -> dict[str, Outcome]:
    """Run every program in a process of its own; return what each returned.

    Fails with a rank's traceback if it raised one.
    """
    pipes, pids = {}, {}
    for name, program in programs.items():
        here, there = Pipe()
        pid = os.fork()
        if pid == 0:
            here.close()
            _become(name, program, Board(there), deadline_s)
        there.close()
        pipes[name], pids[name] = here, pid
    try:
        values = _serve(pipes, time.monotonic() + deadline_s)
        return {name: Outcome(values.get(name), _wait(pid)) for name, pid in pids.items()}
    finally:
        for pid in pids.values():
            _end(pid)
        for pipe in pipes.values():
            pipe.close()


def _become(name: str, program: Program, board: Board, deadline_s: float) -> None:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, deadline_s + 5)
        board.put(f"value/{name}", program(board))
        code = 0
    except BaseException:  # noqa: BLE001 - the parent fails with it
        board.put(f"error/{name}", traceback.format_exc())
    finally:
        os._exit(code)


def _serve(pipes: dict[str, mpc.Connection[Any, Any]], deadline: float) -> dict[str, Any]:
    known: dict[str, Any] = {}
    waiting: list[tuple[str, mpc.Connection[Any, Any]]] = []
    open_pipes = {pipe: name for name, pipe in pipes.items()}
    while open_pipes:
        ready = mpc.wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            left = sorted(open_pipes.values())
            msg = f"{left} did not end; waiting for {[k for k, _ in waiting]}"
            raise AssertionError(msg)
        for pipe in ready:
            assert isinstance(pipe, mpc.Connection)
            try:
                verb, key, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                del open_pipes[pipe]
                continue
            if key.startswith("error/"):
                msg = f"{key[6:]}:\n{value}"
                raise AssertionError(msg)
            if verb == "put":
                known[key] = value
            else:
                waiting.append((key, pipe))
        for key, pipe in list(waiting):
            if key in known:
                waiting.remove((key, pipe))
                with contextlib.suppress(BrokenPipeError):  # it was killed while it waited
                    pipe.send(known[key])
    return {key[6:]: value for key, value in known.items() if key.startswith("value/")}


def _wait(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return


# --- fabrics --------------------------------------------------------------------------------------


def uid_of(name: str) -> str:
    return f"{name}-0000/0"


def make_fabric(board: Board, name: str, *, kind: str = "links", **options: Any) -> Fabric:
    """Return a fabric of this process, and publish where it listens."""
    options = {"timeouts": TIMEOUTS, "address": "127.0.0.1", **options}
    fabric = FABRICS[kind](job="job", secret=SECRET, uid=uid_of(name), **options)
    board.put(f"endpoint/{name}", fabric.endpoint)
    return fabric


def make_plan(board: Board, epoch: int, names: list[str]) -> Plan:
    """Return the plan in which `names` hold the ranks in this order."""
    return Plan(
        epoch=epoch,
        members=tuple(
            Member(
                rank=rank,
                worker=uid_of(name),
                node=name,
                endpoint=board.get(f"endpoint/{name}"),
            )
            for rank, name in enumerate(names)
        ),
    )


def join(board: Board, name: str, names: list[str], **options: Any) -> Fabric:
    """Return a fabric in its first world, its process groups in torch's hands."""
    fabric = make_fabric(board, name, **options)
    fabric.form(make_plan(board, 1, names), timeout_s=5)
    register(fabric)
    return fabric


def register(fabric: Fabric) -> None:
    """Put the process groups of this process into torch's hands, as a script would."""
    intercept.install(fabric)
    dist.init_process_group()


def leave(fabric: Fabric) -> None:
    """End a fabric without alarming anybody."""
    intercept.uninstall()
    fabric.close(bye=True)


def in_world(
    program: Callable[[int, int], Any], size: int, *, deadline_s: float = DEADLINE_S
) -> dict[str, Any]:
    """Run `program(rank, size)` on every rank of a fresh world; return what each returned."""
    names = [f"n{rank}" for rank in range(size)]

    def rank_program(board: Board, rank: int) -> Any:
        fabric = join(board, names[rank], names)
        result = program(rank, size)
        if fabric.fault is None:
            fabric.exchange(b"done")
        leave(fabric)
        return result

    programs: dict[str, Program] = {
        name: functools.partial(rank_program, rank=rank) for rank, name in enumerate(names)
    }
    outcomes = run(programs, deadline_s=deadline_s)
    return {name: outcome.value for name, outcome in outcomes.items()}


def in_fabrics(
    program: Callable[[Fabric, Board, str], Any], size: int, **options: Any
) -> dict[str, Any]:
    """Run `program(fabric, board, name)` on every rank of a fresh world, and end its fabric."""
    names = [f"n{rank}" for rank in range(size)]

    def rank_program(board: Board, name: str) -> Any:
        fabric = join(board, name, names, **options)
        result = program(fabric, board, name)
        leave(fabric)
        return result

    programs: dict[str, Program] = {
        name: functools.partial(rank_program, name=name) for name in names
    }
    return {name: outcome.value for name, outcome in run(programs).items()}
