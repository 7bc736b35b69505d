"""Cases: groups of some ranks, meshes, and what is known of a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from integration.comm.parity.case import case, case_for, sample

untyped: Any = dist
"""For what torch has not annotated."""


def used(group: Any, rank: int) -> Any:
    """Use a group for a little of everything; return what came out."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    size, place = dist.get_world_size(group), dist.get_rank(group)
    tensor = sample(rank, 4)
    dist.all_reduce(tensor, group=group)
    outs = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(outs, sample(rank, 3), group=group)
    root = torch.tensor([rank])
    dist.broadcast(root, group=group, group_src=size - 1)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, (rank, place), group=group)
    dist.barrier(group)
    ranks = dist.get_process_group_ranks(group)
    return ranks, place, size, tensor, outs, root, objects


def used_up(group: Any, rank: int) -> Any:
    """Use a group and destroy it: names of groups with local synchronization count those alive."""
    result = used(group, rank)
    dist.destroy_process_group(group)
    return result


@case
def the_world_is_known(rank: int, _size: int) -> Any:
    world = dist.group.WORLD
    assert world is not None
    return [
        dist.get_backend(),
        dist.get_backend(world),
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_process_group_ranks(world),
        dist.get_group_rank(world, rank),
        dist.get_global_rank(world, rank),
        dist.is_initialized(),
        world.rank(),
        world.size(),
        world.group_desc,
        dist.get_pg_count(),
    ]


@case
def subgroups_overlap(rank: int, size: int) -> Any:
    groups = [dist.new_group([place, (place + 1) % size]) for place in range(size)]
    results = [used(group, rank) for group in groups]
    for group in groups:
        dist.destroy_process_group(group)
    return results


@case
def a_subgroup_of_one(rank: int, size: int) -> Any:
    group = dist.new_group([size - 1])
    return used_up(group, rank)


@case
def a_subgroup_of_everybody(rank: int, _size: int) -> Any:
    return used_up(dist.new_group(), rank)


@case
def a_subgroup_sorts_its_ranks(rank: int, size: int) -> Any:
    return used_up(dist.new_group(list(reversed(range(size)))), rank)


@case
def a_subgroup_keeps_its_order(rank: int, size: int) -> Any:
    return used_up(dist.new_group(list(reversed(range(size))), sort_ranks=False), rank)


@case
def a_subgroup_with_local_synchronization(rank: int, size: int) -> Any:
    """Every rank makes one: torch 2.14 counts them, and names later groups by the count."""
    ends = [0, size - 1]
    ranks = ends if rank in ends else list(range(1, size - 1))
    group = dist.new_group(ranks, use_local_synchronization=True)
    return used_up(group, rank)


@case
def a_subgroup_with_everything_given(rank: int, size: int) -> Any:
    group = dist.new_group(
        [0, size - 1], timeout=timedelta(seconds=20), backend="gloo", group_desc="both ends"
    )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    known = dist.get_backend(group), group.group_desc
    return known, used_up(group, rank)


@case
def a_group_one_is_not_in(rank: int, size: int) -> Any:
    group = dist.new_group([0])
    tensor = sample(rank, 3)
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, 0, group=group) if rank == 0 else None
    gathered: list[Any] = ["untouched"]
    dist.all_gather_object(gathered, rank, group=group)
    dist.barrier(group)
    dist.monitored_barrier(group)
    known = dist.get_rank(group), dist.get_world_size(group), size
    dist.destroy_process_group(group)
    return tensor, gathered, known


@case
def roots_by_global_and_group_rank(rank: int, size: int) -> Any:
    ranks = list(range(1, size))
    group = dist.new_group(ranks)
    if rank == 0:
        return None
    results: list[Any] = []
    for root in ranks:
        by_global, by_group = sample(rank, 3), sample(rank, 3)
        dist.broadcast(by_global, root, group=group)
        dist.broadcast(by_group, group=group, group_src=root - 1)
        objects = [rank]
        dist.broadcast_object_list(objects, src=root, group=group)
        outs: list[Any] | None = [None] * len(ranks) if rank == root else None
        dist.gather_object(rank, outs, dst=root, group=group)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, ranks if rank == root else None, src=root, group=group)
        results.append([by_global, by_group, objects, outs, mine])
    dist.destroy_process_group(group)
    return results


@case
def messages_in_a_subgroup(rank: int, size: int) -> Any:
    ranks = list(range(1, size))
    group = dist.new_group(ranks)
    if rank == 0:
        return None
    if size == 2:
        return used_up(group, rank)
    after, before = rank % (size - 1), (rank - 2) % (size - 1)
    received = torch.zeros(3)
    work = dist.isend(sample(rank, 3), group=group, group_dst=after)
    source = dist.recv(received, group=group)
    assert work is not None
    work.wait()
    objects: list[Any] = [None]
    if rank == 1:
        dist.send_object_list([rank], group=group, group_dst=after)
    if rank == 2:
        dist.recv_object_list(objects, group=group, group_src=before)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return source, received, objects


@case
def a_rank_that_is_not_in_the_group(rank: int, size: int) -> Any:
    group = dist.new_group(list(range(size - 1)))
    if rank == size - 1:
        return None
    try:
        dist.broadcast(torch.ones(3), size - 1, group=group)
    finally:
        dist.destroy_process_group(group)
    return "taken"


@case
def groups_are_destroyed(rank: int, size: int) -> Any:
    first, second = dist.new_group([0, size - 1]), dist.new_group([0, size - 1])
    before = used_up(first, rank)
    return before, used_up(second, rank)


@case
def a_destroyed_group_is_gone(rank: int, _size: int) -> Any:
    group = dist.new_group()
    used_up(group, rank)
    return dist.get_backend(group), rank


@case
def new_groups_get_new_names(_rank: int, _size: int) -> Any:
    groups = [dist.new_group() for _ in range(3)]
    names = {group.group_name for group in groups}
    for group in groups:
        dist.destroy_process_group(group)
    return len(names)


@case_for(2, 4, 8)
def subgroups_of_two(rank: int, _size: int) -> Any:
    mine, every = untyped.new_subgroups(2)
    return used_up(mine, rank), len(every)


@case_for(4)
def subgroups_by_enumeration(rank: int, _size: int) -> Any:
    mine, every = untyped.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    return used_up(mine, rank), len(every)


@case
def a_mesh_of_one_dimension(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    return used(mesh.get_group(), rank), mesh.get_local_rank(), mesh.get_coordinate()


@case_for(4, 8)
def a_mesh_of_two_dimensions(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return (
        used(mesh.get_group("replicate"), rank),
        used(mesh["shard"].get_group(), rank),
        mesh.get_coordinate(),
        mesh.get_local_rank("shard"),
    )


@case_for(8)
def a_mesh_of_three_dimensions(rank: int, _size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("both")
    groups = [used(mesh.get_group(name), rank) for name in ("pp", "dp", "tp")]
    return groups, used(flat.get_group(), rank), mesh.get_coordinate()
