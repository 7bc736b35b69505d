"""Cases: what is refused before anything is sent: one rank alone can see that it is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from integration.comm.parity.case import add

Call = Callable[[int, int], Any]
untyped: Any = dist
"""For what torch has not annotated, and for arguments of the wrong type."""
CALLS: dict[str, Call] = {
    "all_reduce_sparse_csr": lambda r, n: dist.all_reduce(torch.eye(3).to_sparse_csr()),
    "all_reduce_quantized": lambda r, n: dist.all_reduce(
        torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)
    ),
    "all_reduce_of_a_list": lambda r, n: dist.all_reduce([torch.ones(3)]),
    "all_reduce_of_nothing": lambda r, n: dist.all_reduce(None),
    "all_reduce_op_as_text": lambda r, n: dist.all_reduce(torch.ones(3), "sum"),
    "all_reduce_op_unknown": lambda r, n: dist.all_reduce(torch.ones(3), dist.ReduceOp.UNUSED),
    "all_reduce_coalesced_empty": lambda r, n: dist.all_reduce_coalesced([]),
    "all_reduce_coalesced_types": lambda r, n: dist.all_reduce_coalesced(
        [torch.ones(3), torch.ones(3).int()]
    ),
    "all_reduce_coalesced_sparse": lambda r, n: dist.all_reduce_coalesced(
        [torch.eye(3).to_sparse()]
    ),
    "all_reduce_coalesced_op": lambda r, n: dist.all_reduce_coalesced(
        [torch.ones(3)], dist.ReduceOp.BAND
    ),
    "reduce_root_too_high": lambda r, n: dist.reduce(torch.ones(3), group_dst=n),
    "reduce_root_negative": lambda r, n: dist.reduce(torch.ones(3), group_dst=-1),
    "reduce_dst_too_high": lambda r, n: dist.reduce(torch.ones(3), n),
    "reduce_sparse": lambda r, n: dist.reduce(torch.eye(3).to_sparse(), 0),
    "reduce_without_a_root": lambda r, n: dist.reduce(torch.ones(3)),
    "broadcast_root_too_high": lambda r, n: dist.broadcast(torch.ones(3), group_src=n),
    "broadcast_src_too_high": lambda r, n: dist.broadcast(torch.ones(3), n),
    "broadcast_root_negative": lambda r, n: dist.broadcast(torch.ones(3), group_src=-1),
    "broadcast_both_roots": lambda r, n: dist.broadcast(torch.ones(3), 0, group_src=0),
    "broadcast_sparse": lambda r, n: dist.broadcast(torch.eye(3).to_sparse(), 0),
    "all_gather_too_few": lambda r, n: dist.all_gather(
        [torch.ones(3) for _ in range(n - 1)], torch.ones(3)
    ),
    "all_gather_too_many": lambda r, n: dist.all_gather(
        [torch.ones(3) for _ in range(n + 1)], torch.ones(3)
    ),
    "all_gather_none": lambda r, n: dist.all_gather([], torch.ones(3)),
    "all_gather_own_place_too_short": lambda r, n: dist.all_gather(
        [torch.ones(2) for _ in range(n)], torch.ones(3)
    ),
    "all_gather_types": lambda r, n: dist.all_gather(
        [torch.ones(3).int() for _ in range(n)], torch.ones(3)
    ),
    "all_gather_sparse": lambda r, n: dist.all_gather(
        [torch.eye(3).to_sparse() for _ in range(n)], torch.eye(3).to_sparse()
    ),
    "all_gather_tuple": lambda r, n: dist.all_gather(
        tuple(torch.ones(3) for _ in range(n)), torch.ones(3)
    ),
    "all_gather_into_tensor_too_short": lambda r, n: dist.all_gather_into_tensor(
        torch.ones(3 * n - 1), torch.ones(3)
    ),
    "all_gather_into_tensor_too_long": lambda r, n: dist.all_gather_into_tensor(
        torch.ones(3 * n + 1), torch.ones(3)
    ),
    "all_gather_into_tensor_types": lambda r, n: dist.all_gather_into_tensor(
        torch.ones(3 * n).int(), torch.ones(3)
    ),
    "all_gather_coalesced_counts": lambda r, n: dist.all_gather_coalesced(
        [[torch.ones(3)] for _ in range(n)], [torch.ones(3), torch.ones(3)]
    ),
    "all_gather_coalesced_too_few": lambda r, n: dist.all_gather_coalesced(
        [[torch.ones(3)] for _ in range(n - 1)], [torch.ones(3)]
    ),
    "all_gather_coalesced_shapes": lambda r, n: dist.all_gather_coalesced(
        [[torch.ones(2)] for _ in range(n)], [torch.ones(3)]
    ),
    "all_gather_coalesced_empty": lambda r, n: dist.all_gather_coalesced(
        [[] for _ in range(n)], []
    ),
    "gather_too_few": lambda r, n: (
        r or dist.gather(torch.ones(3), [torch.ones(3) for _ in range(n - 1)])
    ),
    "gather_shapes": lambda r, n: (
        r or dist.gather(torch.ones(3), [torch.ones(2) for _ in range(n)])
    ),
    "gather_types": lambda r, n: (
        r or dist.gather(torch.ones(3), [torch.ones(3).int() for _ in range(n)])
    ),
    "gather_list_missing": lambda r, n: r or dist.gather(torch.ones(3)),
    "gather_list_not_wanted": lambda r, n: (
        dist.gather(torch.ones(3), [torch.ones(3)] * n, dst=1) if r != 1 else None
    ),
    "gather_root_too_high": lambda r, n: dist.gather(torch.ones(3), group_dst=n),
    "gather_root_negative": lambda r, n: dist.gather(torch.ones(3), group_dst=-1),
    "gather_sparse": lambda r, n: (
        r or dist.gather(torch.eye(3).to_sparse(), [torch.eye(3).to_sparse() for _ in range(n)])
    ),
    "scatter_too_few": lambda r, n: (
        r or dist.scatter(torch.ones(3), [torch.ones(3) for _ in range(n - 1)])
    ),
    "scatter_shapes": lambda r, n: (
        r or dist.scatter(torch.ones(3), [torch.ones(2) for _ in range(n)])
    ),
    "scatter_types": lambda r, n: (
        r or dist.scatter(torch.ones(3), [torch.ones(3).int() for _ in range(n)])
    ),
    "scatter_list_missing": lambda r, n: r or dist.scatter(torch.ones(3)),
    "scatter_root_too_high": lambda r, n: dist.scatter(torch.ones(3), group_src=n),
    "scatter_root_negative": lambda r, n: dist.scatter(torch.ones(3), group_src=-1),
    "scatter_sparse": lambda r, n: (
        r or dist.scatter(torch.eye(3).to_sparse(), [torch.eye(3).to_sparse() for _ in range(n)])
    ),
    "reduce_scatter_too_few": lambda r, n: dist.reduce_scatter(
        torch.ones(3), [torch.ones(3) for _ in range(n - 1)]
    ),
    "reduce_scatter_too_many": lambda r, n: dist.reduce_scatter(
        torch.ones(3), [torch.ones(3) for _ in range(n + 1)]
    ),
    "reduce_scatter_none": lambda r, n: dist.reduce_scatter(torch.ones(3), []),
    "reduce_scatter_shapes": lambda r, n: dist.reduce_scatter(
        torch.ones(2), [torch.ones(3) for _ in range(n)]
    ),
    "reduce_scatter_types": lambda r, n: dist.reduce_scatter(
        torch.ones(3).int(), [torch.ones(3) for _ in range(n)]
    ),
    "reduce_scatter_sparse": lambda r, n: dist.reduce_scatter(
        torch.eye(3).to_sparse(), [torch.eye(3).to_sparse() for _ in range(n)]
    ),
    "reduce_scatter_tensor_too_short": lambda r, n: dist.reduce_scatter_tensor(
        torch.ones(3), torch.ones(3 * n - 1)
    ),
    "reduce_scatter_tensor_too_long": lambda r, n: dist.reduce_scatter_tensor(
        torch.ones(3), torch.ones(3 * n + 1)
    ),
    "reduce_scatter_tensor_types": lambda r, n: dist.reduce_scatter_tensor(
        torch.ones(3).int(), torch.ones(3 * n)
    ),
    "all_to_all_too_few": lambda r, n: dist.all_to_all(
        [torch.ones(3) for _ in range(n - 1)], [torch.ones(3) for _ in range(n - 1)]
    ),
    "all_to_all_counts": lambda r, n: dist.all_to_all(
        [torch.ones(3) for _ in range(n)], [torch.ones(3) for _ in range(n + 1)]
    ),
    "all_to_all_types": lambda r, n: dist.all_to_all(
        [torch.ones(3).int() for _ in range(n)], [torch.ones(3) for _ in range(n)]
    ),
    "all_to_all_none": lambda r, n: dist.all_to_all([], []),
    "all_to_all_sparse": lambda r, n: dist.all_to_all(
        [torch.eye(3).to_sparse() for _ in range(n)], [torch.eye(3).to_sparse() for _ in range(n)]
    ),
    "all_to_all_single_count_of_sizes": lambda r, n: dist.all_to_all_single(
        torch.ones(2 * n), torch.ones(2 * n), [2] * (n - 1), [2] * (n - 1)
    ),
    "all_to_all_single_sum_of_sizes": lambda r, n: dist.all_to_all_single(
        torch.ones(2 * n), torch.ones(2 * n), [1] * n, [1] * n
    ),
    "all_to_all_single_types": lambda r, n: dist.all_to_all_single(
        torch.ones(2 * n).int(), torch.ones(2 * n)
    ),
    "all_to_all_single_sparse": lambda r, n: dist.all_to_all_single(
        torch.eye(n).to_sparse(), torch.eye(n).to_sparse()
    ),
    "send_to_oneself": lambda r, n: dist.send(torch.ones(3), r),
    "send_to_nobody": lambda r, n: dist.send(torch.ones(3)),
    "send_negative_tag": lambda r, n: dist.send(torch.ones(3), (r + 1) % n, tag=-1),
    "send_tag_as_text": lambda r, n: untyped.send(torch.ones(3), (r + 1) % n, tag="a"),
    "send_tag_too_high": lambda r, n: dist.send(torch.ones(3), (r + 1) % n, tag=1 << 33),
    "send_sparse": lambda r, n: dist.send(torch.eye(3).to_sparse(), (r + 1) % n),
    "send_a_list": lambda r, n: untyped.send([torch.ones(3)], (r + 1) % n),
    "recv_negative_tag": lambda r, n: dist.recv(torch.ones(3), (r + 1) % n, tag=-1),
    "recv_anysource_negative_tag": lambda r, n: dist.recv(torch.ones(3), tag=-1),
    "recv_sparse": lambda r, n: dist.recv(torch.eye(3).to_sparse(), (r + 1) % n),
    "batch_of_nothing": lambda r, n: dist.batch_isend_irecv([]),
    "batch_of_other_things": lambda r, n: untyped.batch_isend_irecv([torch.ones(3)]),
    "barrier_timeout_as_number": lambda r, n: untyped.barrier(timeout=3),
    "monitored_barrier_timeout_as_text": lambda r, n: dist.monitored_barrier(timeout="3"),
    "split_group": lambda r, n: dist.split_group(split_ranks=[list(range(n))]),
    "new_group_twice_the_same_rank": lambda r, n: dist.new_group([0, 0]),
    "new_group_rank_too_high": lambda r, n: dist.new_group([0, n]),
    "new_group_too_many": lambda r, n: dist.new_group(list(range(n + 1))),
    "new_group_empty": lambda r, n: dist.new_group([]),
    "new_subgroups_indivisible": lambda r, n: untyped.new_subgroups(n - 1 if n > 2 else 3),
}


def _refused(rank: int, size: int, call: Call) -> Any:
    call(rank, size)
    return "taken"


for _name, _call in CALLS.items():
    add(f"refused-{_name}", functools.partial(_refused, call=_call))
