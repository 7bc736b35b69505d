"""The same over NCCL, one GPU per rank. Without a GPU nothing of it is run."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import Board
from integration.comm.stocked import cross, run_members
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.generation import Use
from tmover.comm.inner import Inner
from tmover.comm.stock import Nccl

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # ranks are forked from this process
GPUS = torch.cuda.device_count() if dist.is_nccl_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU, and a torch that is built with NCCL"),
]
NAMES = [f"n{rank}" for rank in range(max(1, min(GPUS, 4)))]


def total() -> float:
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    return tensor[0].item()


def inner_of(fabric: Fabric) -> Inner:
    world: Any = dist.group.WORLD
    inner = fabric.generation.inners(fabric.epoch)[Use(world.wire_name, "cuda")]
    assert isinstance(inner.communicator, Nccl)
    return inner


def test_a_world_that_keeps_its_members_keeps_its_communicator() -> None:
    def member(fabric: Fabric, board: Board, _name: str) -> None:
        torch.cuda.set_device(fabric.rank)
        assert total() == len(NAMES)
        before = inner_of(fabric)
        cross(fabric, board, 2, NAMES)
        fabric.release(2)
        assert inner_of(fabric) is before
        assert total() == len(NAMES)

    run_members(member, names=NAMES, deadline_s=90)


def test_a_broken_world_aborts_and_the_next_one_builds_ahead() -> None:
    def member(fabric: Fabric, board: Board, _name: str) -> None:
        torch.cuda.set_device(fabric.rank)
        assert total() == len(NAMES)
        before = inner_of(fabric)
        fabric.exchange(b"done")
        fabric.revoke(1, "a test says so")
        fabric.attempt_open = True
        assert total() >= 1
        assert fabric.mode is Mode.REVOKED
        fabric.attempt_open = False
        fabric.quiesce()
        cross(fabric, board, 2, NAMES)
        fabric.release(2)
        assert inner_of(fabric) is not before
        assert total() == len(NAMES)

    run_members(member, names=NAMES, deadline_s=90)
