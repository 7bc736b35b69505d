"""A process that rehearses: every call of torch is answered at once, without a peer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.nn.parallel import DistributedDataParallel

from integration.comm.harness import Board, leave, make_fabric, run
from tmover.comm import intercept
from tmover.comm.fabric import Fabric
from tmover.errors import ConfigError, StateError


def rehearse(program: Callable[[Fabric], Any], *, rank: int = 1, size: int = 4) -> Any:
    """Run `program(fabric)` in a process that rehearses a rank."""

    def body(board: Board) -> Any:
        fabric = make_fabric(board, "s0")
        fabric.rehearse(rank, size)
        intercept.install(fabric)
        dist.init_process_group("gloo")
        result = program(fabric)
        leave(fabric)
        return result

    return run({"s0": body})["s0"].value


def test_ddp_trains_alone() -> None:
    def program(fabric: Fabric) -> None:
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
            bucket_cap_mb=0.0001,
        )
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            assert all(p.grad is not None for p in model.parameters())
            assert fabric.exchange(b"good") == [b"good"] * 4
            optimizer.step()
        fabric.quiesce()

    rehearse(program)


def test_every_collective_is_answered_with_something_valid() -> None:
    def program(_fabric: Fabric) -> None:
        own = torch.tensor([1.0, 2.0])
        dist.all_reduce(own)
        dist.broadcast(own, 0)
        dist.reduce(own, 0)
        assert own.tolist() == [1.0, 2.0]
        parts = [torch.empty(2) for _ in range(4)]
        dist.all_gather(parts, own)
        assert torch.equal(torch.stack(parts), own.expand(4, 2))
        whole = torch.empty(8)
        dist.all_gather_into_tensor(whole, own)
        assert whole.tolist() == [1.0, 2.0] * 4
        out = torch.empty(2)
        dist.reduce_scatter_tensor(out, torch.arange(8.0))
        assert out.tolist() == [2.0, 3.0]
        dist.reduce_scatter(out, [torch.full((2,), float(r)) for r in range(4)])
        assert out.tolist() == [1.0, 1.0]
        dist.scatter(out, None, src=0)
        dist.all_to_all(parts, [own] * 4)
        dist.all_to_all_single(whole, torch.arange(8.0))
        dist.gather(own, None, dst=0)
        dist.barrier()
        dist.send(own, 0)
        assert dist.recv(out) == 2
        assert out.tolist() == [1.0, 1.0]
        work = dist.irecv(out, 3)
        assert work is not None
        assert work.get_future().wait()[0] is not None

    rehearse(program)


def test_object_collectives_are_answered_with_the_own_object() -> None:
    def program(_fabric: Fabric) -> None:
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(gathered, "mine")
        assert gathered == ["mine"] * 4
        objects = ["template", None]
        dist.broadcast_object_list(objects, src=0)
        assert objects == ["template", None]
        out: list[Any] = ["template"]
        dist.scatter_object_list(out, None, src=0)
        assert out == ["template"]
        dist.gather_object("mine", None, dst=0)
        dist.send_object_list(["x"], dst=0)
        dist.recv_object_list(out, src=2)
        assert out == ["template"]

    rehearse(program)


def test_sharded_models_and_meshes_train_alone() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def program(_fabric: Fabric) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()

    rehearse(program)


def test_another_rank_can_be_held_from_now_on() -> None:
    def program(_fabric: Fabric) -> None:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        everybody = dist.new_group()
        intercept.rebind(0)
        assert dist.get_rank() == 0
        assert dist.get_rank(halves[0]) == 0
        assert dist.get_rank(everybody) == 0
        out = torch.empty(2)
        dist.reduce_scatter_tensor(out, torch.arange(8.0))
        assert out.tolist() == [0.0, 1.0]
        intercept.rebind(3)
        assert (dist.get_rank(), dist.get_rank(halves[0]), dist.get_rank(everybody)) == (3, 1, 3)
        dist.new_group([1, 3])
        with pytest.raises(StateError, match="rank 3 cannot become rank 0: it is in groups of"):
            intercept.rebind(0)
        assert dist.get_rank() == 3

    rehearse(program)


def test_init_process_group_takes_any_backend_and_a_second_call_changes_nothing() -> None:
    def program(_fabric: Fabric) -> None:
        assert dist.get_backend() == "gloo"
        group = dist.group.WORLD
        dist.init_process_group("nccl", rank=3, world_size=17)
        assert dist.group.WORLD is group
        dist.destroy_process_group()
        dist.init_process_group()
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        dist.destroy_process_group()
        with pytest.raises(ConfigError, match=r"rank=0, world_size=4.* rank 1 of 4"):
            dist.init_process_group("gloo", rank=0, world_size=4)

    rehearse(program)


def test_what_was_replaced_in_torch_is_put_back() -> None:
    def program(board: Board) -> None:
        before = dist.init_process_group, dist.all_gather_object
        fabric = make_fabric(board, "s0")
        fabric.rehearse(0, 1)
        intercept.install(fabric)
        with pytest.raises(ConfigError, match="installed already"):
            intercept.install(fabric)
        assert dist.init_process_group is not before[0]
        leave(fabric)
        assert (dist.init_process_group, dist.all_gather_object) == before

    run({"s0": program})


def test_a_process_without_a_rank_says_so() -> None:
    def program(board: Board) -> None:
        fabric = make_fabric(board, "s0")
        with pytest.raises(ConfigError, match="no rank yet"):
            _ = fabric.rank
        fabric.close(bye=False)

    run({"s0": program})


def test_tensors_that_cannot_be_moved_are_refused_by_name() -> None:
    def program(_fabric: Fabric) -> None:
        scaled = _make_nccl_premul_sum(2.0)
        with pytest.raises(ConfigError, match=r"reduction .* is not supported"):
            dist.all_reduce(torch.ones(2), scaled)
        with pytest.raises(ConfigError, match="split_group is not supported"):
            dist.group.WORLD.splitGroup([0])  # type: ignore[union-attr]

    rehearse(program)


def test_a_compiled_model_is_not_traced_into_our_group() -> None:
    """Dynamo watches frames that C++ calls; ours are marked without importing it."""

    def program(_fabric: Fabric) -> None:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        compiled: Any = torch.compile(model, backend="eager")
        for _ in range(2):
            compiled(torch.randn(4, 8)).sum().backward()

    rehearse(program)


def test_the_communicator_starts_without_what_costs_time() -> None:
    code = (
        "import sys, torch.distributed\n"
        "before = set(sys.modules)\n"
        "import tmover.comm.intercept\n"
        "new = set(sys.modules) - before\n"
        "bad = {m for m in new if m.split('.')[0] in ('asyncio', 'click', 'rich')}\n"
        "bad |= {m for m in new if m.startswith('torch._dynamo')}\n"
        "assert not bad, bad\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
