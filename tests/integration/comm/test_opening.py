"""Who is accused when links cannot be opened: who did not answer, and nobody else."""

from __future__ import annotations

import gc
import pathlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from integration.comm.harness import SECRET, TIMEOUTS, uid_of
from tmover.comm.fabric import Fabric
from tmover.core.events import Member, Plan
from tmover.errors import LinkError


@contextmanager
def fabrics(*names: str) -> Iterator[list[Fabric]]:
    made = [
        Fabric(job="job", secret=SECRET, uid=uid_of(name), address="127.0.0.1", timeouts=TIMEOUTS)
        for name in names
    ]
    try:
        yield made
    finally:
        for fabric in made:
            fabric.close(bye=True)


def plan(epoch: int, **endpoints: str) -> Plan:
    return Plan(
        epoch=epoch,
        members=tuple(
            Member(rank=rank, worker=uid_of(name), node=name, endpoint=endpoint)
            for rank, (name, endpoint) in enumerate(endpoints.items())
        ),
    )


def accused(fabric: Fabric, what: Plan, *, timeout_s: float) -> tuple[str, ...]:
    """Return whom a fabric could not reach."""
    try:
        fabric.prepare(what, timeout_s=timeout_s)
    except LinkError as error:
        return error.peers
    return ()


def test_a_peer_that_never_answers_lets_nobody_else_be_accused() -> None:
    """Of three ranks one is silent; the last dials both others, first that one; the first waits."""
    with socket.create_server(("127.0.0.1", 0)) as silent, fabrics("n0", "n2") as (first, last):
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        what = plan(1, n1=nobody, n0=first.endpoint, n2=last.endpoint)
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(accused, f, what, timeout_s=4.0) for f in (first, last)]

        assert [call.result() for call in calls] == [(uid_of("n1"),)] * 2


def test_what_could_not_be_opened_leaves_nothing_behind() -> None:
    """Not even until the interpreter looks for cycles: some training scripts switch that off."""

    def count() -> int:
        return len(list(pathlib.Path("/proc/self/fd").iterdir()))

    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    gc.disable()
    try:
        with fabrics("n1") as (fabric,):
            before = count()
            for epoch in range(1, 6):
                what = plan(epoch, n0=nobody, n1=fabric.endpoint, n2=nobody)
                assert accused(fabric, what, timeout_s=0.02) == (uid_of("n0"), uid_of("n2"))
            assert count() == before
    finally:
        gc.enable()
