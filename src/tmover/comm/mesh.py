"""A mesh: the links of one group in one epoch, by rank, and what is sent over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tmover.comm.frame import Kind, Op, Stamp
from tmover.comm.latch import Latch
from tmover.comm.link import Link
from tmover.comm.relay import Relay
from tmover.comm.tensors import view
from tmover.comm.transfer import Burnt, Collect, Fold, Onto, Receive, Send, transfer

Rows = list[torch.Tensor]
Find = Callable[[Sequence[int]], Mapping[int, Link]]
"""Returns the links to these ranks, opened if need be."""
_ALIGN = 64
_ROWS_KEPT = 256


class Mesh:
    """Bound to ranks and to an epoch; the links themselves know neither."""

    def __init__(
        self,
        *,
        epoch: int,
        rank: int,
        size: int,
        find: Find,
        latch: Latch,
        burnt: Burnt,
        timeout_s: float,
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.size = size
        self.latch = latch
        self.timeout_s = timeout_s
        self._find = find
        self._links: dict[int, Link] = {}
        self._burnt = burnt
        self._seq = 0
        with torch.inference_mode(mode=False):
            self._scratch = torch.empty(0, dtype=torch.uint8)
        self._rowed = self._scratch
        self._rows: dict[tuple[torch.dtype, int], Rows] = {}
        self.peers = tuple((rank + i) % size for i in range(1, size))
        """The other ranks, each rank starting with its successor."""

    def need(self, ranks: Sequence[int]) -> None:
        """Make sure of the links to these ranks. Raises as opening links does."""
        missing = [rank for rank in ranks if rank not in self._links]
        if missing:
            self._links.update(self._find(missing))

    def call(
        self, op: Op, ranks: Sequence[int] | None = None, *, total: int = 0, detail: int = 0
    ) -> Call:
        """Begin the next collective, of `total` bytes per rank, with these ranks (or all)."""
        self.need(self.peers if ranks is None else ranks)
        self._seq += 1
        return Call(self, Stamp(Kind.DATA, op, detail, self.epoch, self._seq, total))

    def link(self, rank: int) -> Link:
        """Return the link to another rank, which was needed before."""
        return self._links[rank]

    def scratch(self, size: int) -> torch.Tensor:
        """Return at least `size` bytes of memory, the same again until more is asked for."""
        if self._scratch.numel() < size:
            with torch.inference_mode(mode=False):
                self._scratch = torch.empty(-(-size // _ALIGN) * _ALIGN, dtype=torch.uint8)
        return self._scratch

    def rows(self, like: torch.Tensor) -> Rows:
        """Return scratch memory for a row like `like` of every rank, valid until the next call."""
        key = (like.dtype, like.numel())
        rows = self._rows.get(key)
        if rows is not None:
            return rows
        with torch.inference_mode(mode=False):  # or nobody could write to them after an evaluation
            size = like.numel() * like.element_size()
            scratch = self.scratch(size * self.size)
            if len(self._rows) >= _ROWS_KEPT or scratch is not self._rowed:
                self._rows.clear()
            self._rowed = scratch
            rows = [
                scratch[rank * size : (rank + 1) * size].view(like.dtype)
                for rank in range(self.size)
            ]
        self._rows[key] = rows
        return rows

    def everybody(
        self,
        kind: Kind,
        payload: bytes,
        timeout_s: float,
        *,
        halfway: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Send `payload` to all; return what each rank sent here.

        `halfway` is called when one peer has been told and the others have not: the moment at which
        a fault is hardest to get right.
        """
        self._seq += 1
        seq = 0 if kind is Kind.BARRIER else self._seq
        stamp = Stamp(kind, Op.NONE, 0, self.epoch, seq, len(payload))
        sends, receives = [], {}
        for rank in self.peers:
            link = self.link(rank)
            sends.append(Send(link, stamp, memoryview(payload)))
            receives[rank] = Collect(link, stamp, self._burnt)
        if halfway is not None:
            transfer(sends[:1], [], self.latch, timeout_s)
            halfway()
            sends = sends[1:]
        transfer(sends, list(receives.values()), self.latch, timeout_s)
        return [
            payload if rank == self.rank else bytes(receives[rank].data)
            for rank in range(self.size)
        ]

    def hand_on(self, payload: bytes, *, to: int, source: int, timeout_s: float) -> bytes:
        """Send `payload` to one rank; return what another one has sent here."""
        self._seq += 1
        stamp = Stamp(Kind.RECORD, Op.NONE, 0, self.epoch, self._seq, len(payload))
        received = Collect(self.link(source), stamp, self._burnt)
        send = Send(self.link(to), stamp, memoryview(payload))
        transfer([send], [received], self.latch, timeout_s)
        return bytes(received.data)

    def send(self, stamp: Stamp, rank: int, data: memoryview) -> Send:
        """Return a message to `rank`."""
        return Send(self.link(rank), stamp, data)

    def receive(self, stamp: Stamp, rank: int, into: memoryview) -> Receive:
        """Return a message from `rank`, to be written into `into`."""
        return Receive(self.link(rank), stamp, into, self._burnt)

    def fold(self, stamp: Stamp, rank: int, scratch: memoryview, onto: Onto) -> Fold:
        """Return a message from `rank`, to be folded onto what is there."""
        return Fold(self.link(rank), stamp, scratch, self._burnt, onto=onto)


class Call:
    """One collective: its messages, which all bear the same stamp."""

    def __init__(self, mesh: Mesh, stamp: Stamp) -> None:
        self._mesh = mesh
        self._stamp = stamp

    def send(self, rank: int, row: torch.Tensor) -> Send:
        """Return a message to `rank`."""
        return self._mesh.send(self._stamp, rank, view(row))

    def receive(self, rank: int, row: torch.Tensor) -> Receive:
        """Return a message from `rank`."""
        return self._mesh.receive(self._stamp, rank, view(row))

    def send_own(self, rank: int, row: torch.Tensor) -> Send:
        """Return a message to `rank` in a collective whose messages have sizes of their own."""
        data = view(row)
        return self._mesh.send(self._stamp._replace(total=len(data)), rank, data)

    def receive_own(self, rank: int, row: torch.Tensor) -> Receive:
        """Return a message from `rank` in a collective whose messages have sizes of their own."""
        into = view(row)
        return self._mesh.receive(self._stamp._replace(total=len(into)), rank, into)

    def fold(
        self,
        rank: int,
        row: torch.Tensor,
        scratch: torch.Tensor,
        fold: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> Fold:
        """Return a message from `rank` that is folded into `row`, a segment at a time."""
        width = row.element_size()
        segment = scratch.view(row.dtype)

        def into_row(offset: int, length: int) -> None:
            first, count = offset // width, length // width
            fold(row[first : first + count], segment[:count])

        onto = Onto(size=row.numel() * width, fold=into_row)
        return self._mesh.fold(self._stamp, rank, view(scratch), onto)

    def go(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Carry the messages out, all at once."""
        transfer(sends, receives, self._mesh.latch, self._mesh.timeout_s)

    def relay(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Carry the messages out as a chain: each received one is the next to be sent."""
        Relay(sends, receives).run(self._mesh.latch, self._mesh.timeout_s)
