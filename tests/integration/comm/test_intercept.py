"""A script that asks torch for gloo gets our groups, however it asks, and none of torch's own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as d
import torch.distributed.nn
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed import init_process_group
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from integration.comm.harness import Board, leave, make_fabric, make_plan, run
from tmover.comm import intercept, seam
from tmover.comm.group import TmoverGroup

NAMES = ["n0", "n1", "n2", "n3"]
HALVES = [[0, 1], [2, 3]]
Script = Callable[[int], Any]
untyped: Any = dist
"""For what torch gives no types."""


def strays() -> list[str]:
    """Return which groups are torch's own, and where this process listens: each gloo group does."""
    groups = [type(group).__name__ for group in c10d._world.pg_map]
    listening = [
        str(conn.laddr)
        for conn in psutil.Process().net_connections(kind="tcp")
        if conn.status == psutil.CONN_LISTEN
    ]
    ours = {"DefaultGroup", "TmoverGroup"}
    return [name for name in groups if name not in ours] + listening


def in_scripts(script: Script, names: list[str]) -> list[Any]:
    """Run a script that knows nothing of tmover on every rank; its groups are ours and all work."""

    def program(board: Board, name: str, rank: int) -> Any:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK=str(rank), WORLD_SIZE=str(len(names))
        )
        fabric = make_fabric(board, name)
        intercept.install(fabric)
        fabric.form(make_plan(board, 1, names), timeout_s=5)
        result = script(rank)
        assert len(strays()) == 1, strays()  # where this process's own links arrive
        for group in c10d._world.pg_map:
            assert isinstance(group, TmoverGroup)
            total = torch.full((3,), float(rank))
            dist.all_reduce(total, group=group)
            assert total.tolist() == [float(sum(group.ranks))] * 3
        fabric.exchange(b"done")
        leave(fabric)
        return result

    programs = {
        name: functools.partial(program, name=name, rank=rank) for rank, name in enumerate(names)
    }
    return [outcome.value for outcome in run(programs).values()]


# --- the default group ----------------------------------------------------------------------------


def start_by_keywords(rank: int) -> None:
    d.init_process_group(
        backend="gloo",
        init_method="env://",
        world_size=len(NAMES),
        rank=rank,
        timeout=timedelta(seconds=9),
    )


def start_with_a_store(rank: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=len(NAMES))


def start_by_mesh(_rank: int) -> None:
    init_device_mesh("cpu", (4,))


def start_with_a_wrapper(_rank: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo")
    dist.new_group([0, 1])


def start_with_a_barrier(_rank: int) -> None:
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.init_process_group("gloo")


STARTS: dict[str, Script] = {
    "a name imported before": lambda _rank: init_process_group("gloo"),
    "torch.distributed under another name": lambda _rank: d.init_process_group("gloo"),
    "its own module": lambda _rank: c10d.init_process_group("gloo"),
    "keywords": start_by_keywords,
    "no backend": lambda _rank: dist.init_process_group(),
    "backends by device": lambda _rank: dist.init_process_group("cpu:gloo,cuda:nccl"),
    "another init method": lambda _rank: dist.init_process_group("gloo", "tcp://127.0.0.1:1"),
    "a store": start_with_a_store,
    "a device": lambda _rank: dist.init_process_group("gloo", device_id=torch.device("cuda", 0)),
    "a mesh alone": start_by_mesh,
    "torch's debug wrapper": start_with_a_wrapper,
    "torch's barrier behind it": start_with_a_barrier,
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_the_default_group_is_ours_however_it_is_asked_for(start: Script) -> None:
    def script(rank: int) -> Any:
        start(rank)
        return dist.get_rank(), dist.get_world_size(), type(dist.group.WORLD).__name__

    found = in_scripts(script, NAMES)

    assert found == [(rank, 4, "DefaultGroup") for rank in range(4)]


def test_a_script_sees_the_backend_it_has_asked_for() -> None:
    def script(_rank: int) -> Any:
        dist.init_process_group("gloo")
        half = dist.new_group([0, 1])
        mine = [None] if half is dist.GroupMember.NON_GROUP_MEMBER else [None, half]
        return [(dist.get_backend(group), dist.get_backend_config(group)) for group in mine]

    found = in_scripts(script, NAMES)

    config = str(dist.BackendConfig(dist.Backend("gloo")))
    assert found == [[("gloo", config)] * (2 if rank < 2 else 1) for rank in range(4)]


def test_a_group_can_be_destroyed_and_the_world_made_anew() -> None:
    def script(_rank: int) -> None:
        for _ in range(2):
            dist.init_process_group("gloo")
            dist.destroy_process_group(dist.new_group([0, 1, 2, 3]))
            assert len(c10d._world.pg_map) == 1
            dist.barrier()
            dist.destroy_process_group()
        dist.init_process_group("gloo")

    in_scripts(script, NAMES)


# --- the others -----------------------------------------------------------------------------------


def by_new_group(rank: int) -> int:
    for backend in (None, "gloo", "ucc"):
        dist.new_group([2, 0], backend=backend)
    dist.new_group(timeout=timedelta(seconds=9), group_desc="all")
    dist.new_group([3, 1], device_id=None, pg_options=None)
    return 5 if rank in (0, 2) else 3


def by_subgroups(_rank: int) -> int:
    untyped.new_subgroups(2)
    untyped.new_subgroups(4, group_desc="all")
    return 3


def by_enumeration(_rank: int) -> int:
    untyped.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return 2


def by_members_alone(rank: int) -> int:
    """Nobody else calls, so that the ranks' counts of groups differ from then on."""
    if rank in (1, 2):
        dist.new_group([1, 2], use_local_synchronization=True)
    dist.new_group([0, 3], use_local_synchronization=True)
    return 2


def by_tag(rank: int) -> int:
    c10d._new_group_with_tag([0, 1], pg_tag="mine")
    c10d._new_group_with_tag([1, 0], pg_tag="mine", sort_ranks=False)
    return 3 if rank < 2 else 1


def by_mesh(_rank: int) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert mesh.get_group("a").size() == 2
    mesh["a", "b"]._flatten("all")
    return 3


def by_mesh_with_backends(_rank: int) -> int:
    init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"a": "gloo", 1: "ucc"}
    )
    return 3


def by_mesh_of_ranks(_rank: int) -> int:
    DeviceMesh("cpu", HALVES, mesh_dim_names=("a", "b"))
    return 3


def by_mesh_from_groups(rank: int) -> int:
    groups = [dist.new_group(half) for half in HALVES]
    others = [dist.new_group(half) for half in ([0, 2], [1, 3])]
    DeviceMesh.from_group(groups[rank // 2], "cpu")
    both = [others[rank % 2], groups[rank // 2]]
    mesh = DeviceMesh.from_group(both, "cpu", mesh=torch.tensor(HALVES), mesh_dim_names=("a", "b"))
    assert mesh.get_group("b") is groups[rank // 2]
    return 3


def by_functional_collectives(rank: int) -> int:
    """Given ranks, they look for the group that was made for them."""
    untyped.new_subgroups(2)
    total = untyped._functional_collectives.all_reduce(torch.ones(2), "sum", HALVES[rank // 2])
    assert untyped._functional_collectives.wait_tensor(total).tolist() == [2.0, 2.0]
    return 2


def by_autograd_functions(_rank: int) -> int:
    half, _ = untyped.new_subgroups(2)
    tensor = torch.ones(2, requires_grad=True)
    untyped.nn.functional.all_reduce(tensor, group=half).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2.0, 2.0]
    return 2


def by_model_averaging(_rank: int) -> int:
    averagers: Any = hierarchical_model_averager
    averagers.HierarchicalModelAverager(period_group_size_dict={2: 2, 4: 4})
    return 2


def by_splitting(_rank: int) -> int:
    """On the CPU torch does not split gloo either."""
    with pytest.raises(RuntimeError, match="No device associated with the default pg"):
        dist.split_group(split_ranks=HALVES)
    return 1


WAYS = {name.removeprefix("by_"): way for name, way in list(globals().items()) if name[:3] == "by_"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_every_group_is_ours_however_it_is_made(way: Callable[[int], int]) -> None:
    def script(rank: int) -> None:
        dist.init_process_group("gloo")
        expected = way(rank)
        assert len(c10d._world.pg_map) == expected

    in_scripts(script, NAMES)


# --- the tests' own eyes --------------------------------------------------------------------------


def test_a_group_of_torchs_own_would_be_seen() -> None:
    def script(_board: Board) -> list[str]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return strays()

    found = run({"n0": script})["n0"].value

    assert found[0] == "ProcessGroup"
    assert len(found) == 2


def test_torch_is_as_it_was_after_the_end() -> None:
    names = ["init_process_group", *intercept._OBJECTS]

    def script(board: Board) -> None:
        before = [getattr(module, name) for module in (dist, c10d) for name in names]
        fabric = make_fabric(board, "n0")
        intercept.install(fabric)
        held = [getattr(module, name) for module in (dist, c10d) for name in names]
        leave(fabric)
        after = [getattr(module, name) for module in (dist, c10d) for name in names]
        assert all(was is not now for was, now in zip(before, held, strict=True))
        assert after == before

    run({"n0": script})


# --- versions -------------------------------------------------------------------------------------


def test_an_untested_torch_is_named_once_where_the_user_sees_it() -> None:
    code = (
        "import torch; torch.__version__ = '9.9.9'\n"
        "from tmover.comm import intercept\n"
        "from tmover.comm.fabric import Fabric\n"
        "fabric = Fabric(job='job', secret=b's' * 32, uid='n0-0000/0', address='127.0.0.1')\n"
        "for _ in range(2):\n"
        "    intercept.install(fabric)\n"
        "    intercept.uninstall()\n"
        "fabric.close(bye=True)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stderr == seam.doubt("9.9.9") + "\n"
    assert done.stdout == ""


def test_torch_finds_its_way_to_a_group_without_a_backend() -> None:
    def script(_rank: int) -> None:
        dist.init_process_group("gloo")
        world: Any = c10d._get_default_group()
        assert world._get_backend(torch.device("cpu")) is world
        assert c10d._get_object_coll_device() == "cpu"
        assert c10d._device_capability() == ["cpu"]
        with pytest.raises(NotImplementedError), c10d._time_estimator(device=torch.device("cpu")):
            pass

    in_scripts(script, NAMES[:2])


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch has it from 2.14 on")
@pytest.mark.parametrize("root", [0, 2])
def test_a_tensor_is_gathered_into_one(root: int) -> None:
    def script(rank: int) -> list[float]:
        dist.init_process_group("gloo")
        out = torch.zeros(3, 2) if rank == root else None
        untyped.gather_single(torch.full((2,), rank + 1.0), out, dst=root)
        return [] if out is None else out.flatten().tolist()

    found = in_scripts(script, NAMES[:3])

    assert found[root] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
