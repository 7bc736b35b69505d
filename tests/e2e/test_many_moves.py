"""One job whose nodes come and go: what stays must not grow."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import psutil
import pytest

from support.eventually import eventually
from support.training import Kind, Training
from tmover.cluster import LocalCluster
from tmover.wire import JobStatus

SETTLED = 2
"""Moves after which what stays holds all it ever needs."""
GROWTH = 1.05
"""What the memory of a process may be by what it was: the allocator's arenas come and go."""


class Footprint(NamedTuple):
    descriptors: int
    threads: int


def stayers(training: Training) -> list[psutil.Process]:
    """Return the controller, and the ranks that are not moved."""
    controller = training.cluster.controller()
    assert controller is not None
    pids = [controller.pid, *(training.worker(training.node_of(slot)).pid for slot in (0, 2))]
    return [psutil.Process(pid) for pid in pids]


def footprints(processes: list[psutil.Process]) -> list[Footprint]:
    return [Footprint(each.num_fds(), each.num_threads()) for each in processes]


def growth(held: list[Footprint], now: list[Footprint]) -> list[tuple[Footprint, Footprint]]:
    """Return what has more than it had, before and after."""
    pairs = zip(held, now, strict=True)
    return [(a, b) for a, b in pairs if b.descriptors > a.descriptors or b.threads > a.threads]


@pytest.mark.parametrize("moves", [4, pytest.param(20, marks=pytest.mark.full)])
def test_a_job_is_moved_again_and_again_and_nothing_grows(
    cluster: LocalCluster, moves: int
) -> None:
    training = Training(cluster, Kind(steps=1_000_000))
    held: list[Footprint] = []
    memory: list[int] = []
    for number in range(moves):
        training.until(rests)
        processes = stayers(training)
        if number == SETTLED:
            held, memory = footprints(processes), [each.memory_info().rss for each in processes]
        node = training.node_of(1)
        training.cluster.move(training.job, node)
        training.until(lambda s, node=node: s.phase == "training" and s.slots[1].node != node)  # type: ignore[misc]
        eventually(lambda node=node: node not in running(training))  # type: ignore[misc]
        assert training.cluster.scheduler.order(training.job, ()) is not None
    training.until(rests)

    processes = stayers(training)
    with contextlib.suppress(AssertionError):  # what was left is said below
        eventually(lambda: not growth(held, footprints(processes)))
    assert growth(held, footprints(processes)) == []
    now = [each.memory_info().rss for each in processes]
    assert all(after <= before * GROWTH for after, before in zip(now, memory, strict=True)), now
    assert training.cluster.status(training.job).epoch == moves + 1


def rests(status: JobStatus) -> bool:
    return status.phase == "training" and any(1 in s.takes for s in status.standbys)


def running(training: Training) -> set[str]:
    return set(training.cluster.scheduler.running(training.job))
