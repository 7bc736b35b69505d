"""The collectives, as messages over a mesh.

Results depend on ranks only: short reductions fold everybody's tensor in rank order, long ones fold
each piece around the ring from its rank on. Whichever process holds a rank, and whatever arrives
first, the bits are the same. All tensors here are contiguous rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tmover.comm.frame import SEGMENT, Op
from tmover.comm.mesh import Call, Mesh, Rows
from tmover.comm.tensors import Reduction, detail_of, view

FLAT_BYTES = 32 << 10
"""Up to here everybody sends its whole tensor to everybody: one exchange."""
DIRECT_BYTES = 1 << 20
"""Up to here everybody reduces one piece and sends it to everybody: two exchanges. Then: a ring."""


def all_reduce(mesh: Mesh, row: torch.Tensor, reduction: Reduction) -> None:
    """Reduce `row` over all ranks, in place."""
    _reduce_everywhere(mesh, row, reduction, Op.ALL_REDUCE, detail_of(row, reduction))


def reduce(mesh: Mesh, row: torch.Tensor, reduction: Reduction, root: int) -> None:
    """Reduce `row` over all ranks; only `root` needs it."""
    _reduce_everywhere(mesh, row, reduction, Op.REDUCE, detail_of(row, reduction, root))


def _reduce_everywhere(
    mesh: Mesh, row: torch.Tensor, reduction: Reduction, op: Op, detail: int
) -> None:
    if mesh.size == 1:
        return
    size = row.numel() * row.element_size()
    ranks = None if size <= DIRECT_BYTES else _neighbours(mesh)
    call = mesh.call(op, ranks, total=size, detail=detail)
    if size <= FLAT_BYTES:
        _reduce_flat(mesh, call, row, reduction)
    elif size <= DIRECT_BYTES:
        _reduce_direct(mesh, call, row, reduction)
    else:
        _reduce_ring(mesh, call, row, reduction)
    reduction.finish(row, mesh.size)


def _neighbours(mesh: Mesh) -> tuple[int, ...]:
    """Return the ranks next to this one, around the ring."""
    return (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size


def _gather_rows(mesh: Mesh, call: Call, rows: Rows, own: Sequence[torch.Tensor]) -> None:
    """Send each rank its own row, and receive one row from each."""
    call.go(
        [call.send(peer, own[peer]) for peer in mesh.peers],
        [call.receive(peer, rows[peer]) for peer in mesh.peers],
    )


def _fold_rows(
    mesh: Mesh, rows: Rows, own: torch.Tensor, into: torch.Tensor, reduction: Reduction
) -> None:
    """Fold everybody's rows in rank order. `own` stands in this rank's place, and may be `into`."""
    result = own if mesh.rank == 0 else rows[0]
    for rank in range(1, mesh.size):
        reduction.fold(result, own if rank == mesh.rank else rows[rank])
    if result is not into:
        into.copy_(result)


def _reduce_flat(mesh: Mesh, call: Call, row: torch.Tensor, reduction: Reduction) -> None:
    rows = mesh.rows(row)
    _gather_rows(mesh, call, rows, [row] * mesh.size)
    _fold_rows(mesh, rows, row, row, reduction)


def _pieces(row: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split a row into exactly `count` pieces, the last ones shorter or empty."""
    width = -(-row.numel() // count)
    return [row[i * width : (i + 1) * width] for i in range(count)]


def _reduce_direct(mesh: Mesh, call: Call, row: torch.Tensor, reduction: Reduction) -> None:
    pieces = _pieces(row, mesh.size)
    own = pieces[mesh.rank]
    rows = mesh.rows(own)
    _gather_rows(mesh, call, rows, pieces)
    _fold_rows(mesh, rows, own, own, reduction)
    _gather_rows(mesh, call, pieces, [own] * mesh.size)


def _reduce_ring(mesh: Mesh, call: Call, row: torch.Tensor, reduction: Reduction) -> None:
    size, rank = mesh.size, mesh.rank
    pieces = _pieces(row, size)
    scratch = mesh.scratch(SEGMENT)
    after, before = _neighbours(mesh)
    around = [pieces[(rank - turn) % size] for turn in range(2 * size - 1)]
    sends = [call.send(after, piece) for piece in around[:-1]]
    folds = [call.fold(before, piece, scratch, reduction.fold) for piece in around[1:size]]
    fills = [call.receive(before, piece) for piece in around[size:]]
    call.relay(sends, [*folds, *fills])


def reduce_scatter(
    mesh: Mesh, out: torch.Tensor, rows: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    """Reduce the rows of all ranks; `out` becomes this rank's."""
    if mesh.size == 1:
        out.copy_(rows[0])
        return
    total = sum(row.numel() for row in rows) * out.element_size()
    ranks = None if total <= DIRECT_BYTES else _neighbours(mesh)
    call = mesh.call(Op.REDUCE_SCATTER, ranks, total=total, detail=detail_of(out, reduction))
    if total <= DIRECT_BYTES:
        _scatter_direct(mesh, call, out, rows, reduction)
    else:
        _scatter_ring(mesh, call, out, rows, reduction)
    reduction.finish(out, mesh.size)


def _scatter_direct(
    mesh: Mesh, call: Call, out: torch.Tensor, rows: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    heard = mesh.rows(out)
    _gather_rows(mesh, call, heard, rows)
    own = rows[mesh.rank].clone() if mesh.rank == 0 else rows[mesh.rank]  # it is folded into
    _fold_rows(mesh, heard, own, out, reduction)


def _scatter_ring(
    mesh: Mesh, call: Call, out: torch.Tensor, rows: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    size, rank = mesh.size, mesh.rank
    scratch = mesh.scratch(SEGMENT)
    longest = max(row.numel() for row in rows)
    sums = [torch.empty(longest, dtype=out.dtype) for _ in range(2 if size > 2 else 0)]
    after, before = _neighbours(mesh)
    partial = rows[before]
    for turn in range(size - 1):
        theirs = rows[(rank - 2 - turn) % size]
        last = turn == size - 2
        into = out if last else sums[turn % 2][: theirs.numel()]
        into.copy_(theirs)
        call.go([call.send(after, partial)], [call.fold(before, into, scratch, reduction.fold)])
        partial = into


def _spokes(mesh: Mesh, root: int) -> tuple[int, ...]:
    """Return the ranks this one speaks to when all speak to the root alone."""
    return mesh.peers if mesh.rank == root else (root,)


def broadcast(mesh: Mesh, row: torch.Tensor, root: int) -> None:
    """Make every rank's `row` that of `root`."""
    call = mesh.call(
        Op.BROADCAST,
        _spokes(mesh, root),
        total=len(view(row)),
        detail=detail_of(row, root=root),
    )
    if mesh.rank == root:
        call.go([call.send(peer, row) for peer in mesh.peers], [])
    else:
        call.go([], [call.receive(root, row)])


def all_gather(mesh: Mesh, outs: Sequence[torch.Tensor], row: torch.Tensor) -> None:
    """Make `outs[r]` the row of rank r, on every rank. Rows may differ in length."""
    call = mesh.call(Op.ALL_GATHER, detail=detail_of(row))
    outs[mesh.rank].copy_(row)
    call.go(
        [call.send_own(peer, row) for peer in mesh.peers],
        [call.receive_own(peer, outs[peer]) for peer in mesh.peers],
    )


def gather(mesh: Mesh, outs: Sequence[torch.Tensor], row: torch.Tensor, root: int) -> None:
    """Make `outs[r]` the row of rank r, on `root`; elsewhere `outs` is empty."""
    call = mesh.call(Op.GATHER, _spokes(mesh, root), detail=detail_of(row, root=root))
    if mesh.rank != root:
        call.go([call.send_own(root, row)], [])
        return
    outs[root].copy_(row)
    call.go([], [call.receive_own(peer, outs[peer]) for peer in mesh.peers])


def scatter(mesh: Mesh, out: torch.Tensor, rows: Sequence[torch.Tensor], root: int) -> None:
    """Make `out` the row that `root` has for this rank; elsewhere `rows` is empty."""
    call = mesh.call(Op.SCATTER, _spokes(mesh, root), detail=detail_of(out, root=root))
    if mesh.rank != root:
        call.go([], [call.receive_own(root, out)])
        return
    out.copy_(rows[root])
    call.go([call.send_own(peer, rows[peer]) for peer in mesh.peers], [])


def all_to_all(mesh: Mesh, outs: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
    """Make `outs[r]` the row that rank r has for this rank. Rows may differ in length."""
    call = mesh.call(Op.ALL_TO_ALL, detail=detail_of(rows[0]))
    outs[mesh.rank].copy_(rows[mesh.rank])
    call.go(
        [call.send_own(peer, rows[peer]) for peer in mesh.peers],
        [call.receive_own(peer, outs[peer]) for peer in mesh.peers],
    )


def barrier(mesh: Mesh) -> None:
    """Return once every rank has come here."""
    call = mesh.call(Op.BARRIER)
    nothing = torch.empty(0, dtype=torch.uint8)
    call.go(
        [call.send(peer, nothing) for peer in mesh.peers],
        [call.receive(peer, nothing) for peer in mesh.peers],
    )
