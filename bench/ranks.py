"""Processes to measure with: forked from this one, and gone with it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection as mpc
import os
import signal
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from tmover.comm import intercept
from tmover.comm.fabric import Fabric
from tmover.core.events import Member, Plan
from tmover.process import die_with_parent

_HOST = "127.0.0.1"
_WAIT = timedelta(seconds=300)
_SECRET = os.urandom(32)
_links: dict[str, bool] = {"nearby": True}


class Process(NamedTuple):
    """One of the processes, as it sees itself."""

    number: int
    total: int
    store: Any
    """A store that all of them share."""


Program = Callable[[Process], Any]


def run(program: Program, count: int) -> list[Any]:
    """Run `program` in `count` processes; return what each returned.

    Whatever ends this call, none of them is left.
    """
    context = multiprocessing.get_context("fork")
    pipes: dict[Any, int] = {}
    values: dict[int, Any] = {}
    try:
        with socket.create_server((_HOST, 0)) as listener:
            for number in range(count):
                here, there = context.Pipe(duplex=False)
                pipes[here] = number
                args = (program, number, count, listener, there)
                context.Process(target=_become, args=args, daemon=True).start()
                there.close()
        while pipes:
            for pipe in mpc.wait(list(pipes)):
                values[pipes.pop(pipe)] = _receive(pipe)
    finally:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
    return [values[number] for number in range(count)]


def _receive(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        msg = "a process of the measurement failed"
        raise SystemExit(msg) from None


def _become(program: Program, number: int, count: int, listener: socket.socket, pipe: Any) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for one in (signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # who has started this process ends it
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames what all still use
    torch.set_num_threads(1)
    port = listener.getsockname()[1]
    if number == 0:
        store = dist.TCPStore(
            _HOST,
            port,
            is_master=True,
            timeout=_WAIT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    else:
        listener.close()
        store = dist.TCPStore(_HOST, port, timeout=_WAIT)
    pipe.send(program(Process(number, count, store)))
    signal.pause()  # the others may still need this one's store and links


# --- fabrics --------------------------------------------------------------------------------------


class Holder(NamedTuple):
    """A process in one of its lives: who has left comes back as somebody else."""

    number: int
    life: int = 0

    @property
    def node(self) -> str:
        """The name of its node."""
        return f"n{self.number}-{self.life:04}"


def speak_tcp() -> None:
    """Let all processes from now on speak TCP, as if each were on a host of its own."""
    _links["nearby"] = False


def make_fabric(process: Process, holder: Holder) -> Fabric:
    """Return a fabric of this process, and publish where it listens."""
    uid = f"{holder.node}/0"
    fabric = Fabric(job="bench", secret=_SECRET, uid=uid, address=_HOST, nearby=_links["nearby"])
    process.store.set(f"endpoint/{holder.node}", fabric.endpoint)
    return fabric


def make_plan(process: Process, epoch: int, holders: list[Holder]) -> Plan:
    """Return the plan in which `holders` hold the ranks in this order."""
    return Plan(
        epoch=epoch,
        members=tuple(
            Member(
                rank=rank,
                worker=f"{holder.node}/0",
                node=holder.node,
                endpoint=process.store.get(f"endpoint/{holder.node}").decode(),
            )
            for rank, holder in enumerate(holders)
        ),
    )


def join(process: Process, world: int) -> Fabric:
    """Return a fabric in its first world, its process groups in torch's hands."""
    fabric = make_fabric(process, Holder(process.number))
    intercept.install(fabric)
    plan = make_plan(process, 1, [Holder(number) for number in range(world)])
    fabric.form(plan, timeout_s=60)
    dist.init_process_group()
    return fabric


def stock_group(store: Any, rank: int, world: int) -> dist.ProcessGroup:
    """Return gloo's group of all ranks, beside ours, as torch itself would have made it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    name = c10d.GroupName("stock")
    named = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(named, rank, world)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(named, rank, world, _WAIT)
    backend._set_sequence_number_for_group()
    group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(name)
    c10d._world.pg_map[group] = (dist.Backend("gloo"), named)
    c10d._world.pg_names[group] = name
    c10d._world.pg_group_ranks[group] = {number: number for number in range(world)}
    c10d._world.pg_backend_config[group] = "cpu:gloo"
    return group
