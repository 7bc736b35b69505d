"""The process group that torch, DDP and the user hold for ever, whatever process holds a rank.

C++ calls some of the methods here, Python the others, both by these names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from tmover.comm import collectives, sandbox
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.fifo import Fifo
from tmover.comm.inbox import ANY, Answered, Message
from tmover.comm.mesh import Mesh
from tmover.comm.named import NamedGroup
from tmover.comm.p2p import Post
from tmover.comm.tensors import flat, give_back, reduction_of
from tmover.comm.untraced import untraced
from tmover.comm.work import Work
from tmover.comm.world import World
from tmover.errors import ConfigError, Interrupted, LinkError

logger = logging.getLogger(__name__)

Live = Callable[[Mesh], None]
Answer = Callable[[], None]
Tensors = list[torch.Tensor]


def _nothing() -> None:
    """Answer a reduction or a broadcast: the tensor is its own result."""


@untraced
class TmoverGroup(NamedGroup):
    """Runs collectives over the fabric, and answers them where there are no peers."""

    def __init__(
        self, fabric: Fabric, name: str, ranks: Sequence[int], *, rank: int, store: Any
    ) -> None:
        super().__init__(fabric, name, ranks, rank=rank, store=store)
        self._fifo = Fifo(f"tmover-group-{name}")
        self._post = Post(fabric, name, self.ranks)
        fabric.groups[name] = self

    # --- life -------------------------------------------------------------------------------------

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; return whether that is so."""
        return self._fifo.settle(timeout_s) and self._post.settle(timeout_s)

    def close(self) -> None:
        """End this group's threads."""
        self._post.close()
        self._fifo.close()

    def shutdown(self) -> None:
        """Leave the group (`destroy_process_group`)."""
        self._fabric.groups.pop(self._name, None)
        self.close()

    def abort(self) -> None:
        """Leave the group at once; a broken world ends what is under way by itself."""
        self.shutdown()

    # --- how every collective runs ----------------------------------------------------------------

    def _start(
        self, result: Any, live: Live, answer: Answer = _nothing, *, wait: bool = False
    ) -> Work:
        """Run `live` over the present links, or `answer` in its place where there are none."""
        if self._is_answered():
            with torch.no_grad():
                answer()
            return Work(result)
        strict = self.strict
        work = Work(result, lambda: self._perform(live, answer, strict=strict, told=wait))
        if wait:
            self._fifo.run(work)
        else:
            self._fifo.submit(work)
        return work

    def _is_answered(self) -> bool:
        """Return whether collectives are answered here; raise if they are refused."""
        fabric = self._fabric
        if fabric.refusal:
            raise ConfigError(fabric.refusal)
        if fabric.caution:
            caution, fabric.caution = fabric.caution, ""
            logger.warning("%s", caution)
        if fabric.mode is Mode.REVOKED and (self.strict or not fabric.attempt_open):
            msg = "the world is revoked: this attempt will not be kept"
            raise Interrupted(msg)
        return fabric.mode is not Mode.LIVE

    def _perform(self, live: Live, answer: Answer, *, strict: bool, told: bool) -> Exception | None:
        """Carry a collective out; return what went wrong, if anybody is to know.

        `told`: the caller waits, so that he will. C++ looks at the result alone; then the next vote
        raises it.
        """
        fabric = self._fabric
        epoch = fabric.epoch
        try:
            world = fabric.present()
            epoch = world.epoch
            mesh = fabric.mesh(world, self._name)
            mesh.timeout_s = self.timeout_s
            with torch.no_grad():
                live(mesh)
        except LinkError as error:
            fabric.observe(epoch, error.peers, str(error))
            why = str(error)
        except Interrupted as error:
            fabric.revoke(epoch, str(error))
            why = str(error)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the caller gets it from `wait`
            if not told:
                fabric.fault = error
            return error
        else:
            return None
        if strict or not fabric.attempt_open:
            return Interrupted(why)
        with torch.no_grad():
            answer()
        return None

    # --- collectives ------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over all ranks."""
        opts = opts if opts is not None else dist.AllreduceOptions()
        op = opts if isinstance(opts, dist.ReduceOp) else opts.reduceOp
        reduction = reduction_of(op)

        def live(mesh: Mesh) -> None:
            for tensor in tensors:
                row = flat(tensor)
                collectives.all_reduce(mesh, row, reduction)
                give_back(row, tensor)

        return self._start(tensors, live, wait=not getattr(opts, "asyncOp", True))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Make each tensor that of the root."""

        def live(mesh: Mesh) -> None:
            for tensor in tensors:
                row = flat(tensor)
                collectives.broadcast(mesh, row, opts.rootRank)
                give_back(row, tensor)

        return self._start(tensors, live, wait=not opts.asyncOp)

    def allgather(self, outs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        """Gather each tensor from all ranks into a list."""

        def live(mesh: Mesh) -> None:
            for targets, tensor in zip(outs, tensors, strict=True):
                rows = [flat(target) for target in targets]
                collectives.all_gather(mesh, rows, flat(tensor))
                for row, target in zip(rows, targets, strict=True):
                    give_back(row, target)

        def answer() -> None:
            for targets, tensor in zip(outs, tensors, strict=True):
                sandbox.repeat(targets, tensor)

        return self._start(outs, live, answer, wait=_waits(opts))

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Gather a tensor from all ranks into one."""
        return self.all_gather_single_coalesced([out], [tensor], opts)

    def all_gather_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> Work:
        """Gather each tensor from all ranks into one."""

        def live(mesh: Mesh) -> None:
            for out, tensor in zip(outs, tensors, strict=True):
                whole = flat(out)
                collectives.all_gather(mesh, _parts(whole, mesh.size), flat(tensor))
                give_back(whole, out)

        def answer() -> None:
            for out, tensor in zip(outs, tensors, strict=True):
                sandbox.repeat_into(out, tensor)

        return self._start(outs, live, answer, wait=_waits(opts))

    def allgather_coalesced(self, outs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        """Gather several tensors; `outs[r]` are those of rank r."""
        turned = [list(targets) for targets in zip(*outs, strict=True)]
        return self.allgather(turned, tensors, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> Work:
        """Reduce lists of tensors over all ranks; each rank gets its place in them."""
        reduction = reduction_of(opts.reduceOp)

        def live(mesh: Mesh) -> None:
            for out, parts in zip(outs, tensors, strict=True):
                row = flat(out)
                collectives.reduce_scatter(mesh, row, [flat(part) for part in parts], reduction)
                give_back(row, out)

        def answer() -> None:
            for out, parts in zip(outs, tensors, strict=True):
                sandbox.take(out, parts, self.rank())

        return self._start(outs, live, answer, wait=_waits(opts))

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        """Reduce a tensor over all ranks; each rank gets its part."""
        return self.reduce_scatter_single_coalesced([out], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> Work:
        """Reduce several tensors over all ranks; each rank gets its part of each."""
        reduction = reduction_of(opts.reduceOp)

        def live(mesh: Mesh) -> None:
            for out, tensor in zip(outs, tensors, strict=True):
                row = flat(out)
                parts = _parts(flat(tensor), mesh.size)
                collectives.reduce_scatter(mesh, row, parts, reduction)
                give_back(row, out)

        def answer() -> None:
            for out, tensor in zip(outs, tensors, strict=True):
                sandbox.take_from(out, tensor, self.rank())

        return self._start(outs, live, answer, wait=_waits(opts))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Work:
        """Return once every rank has come here."""
        return self._start(None, collectives.barrier, wait=_waits(opts))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: Any = None
    ) -> None:
        """Return once every rank has come here."""
        self._start(None, collectives.barrier, wait=True).wait()

    def gather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> Work:
        """Gather a tensor from all ranks, on the root."""
        targets = outs[0] if outs else []

        def live(mesh: Mesh) -> None:
            rows = [flat(target) for target in targets]
            collectives.gather(mesh, rows, flat(tensors[0]), opts.rootRank)
            for row, target in zip(rows, targets, strict=True):
                give_back(row, target)

        return self._start(
            outs, live, lambda: sandbox.repeat(targets, tensors[0]), wait=_waits(opts)
        )

    def scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> Work:
        """Give each rank the tensor that the root has for it."""
        parts = tensors[0] if tensors else []

        def live(mesh: Mesh) -> None:
            row = flat(outs[0])
            collectives.scatter(mesh, row, [flat(part) for part in parts], opts.rootRank)
            give_back(row, outs[0])

        return self._start(
            outs, live, lambda: sandbox.take(outs[0], parts, self.rank()), wait=_waits(opts)
        )

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce a tensor over all ranks, on the root."""
        reduction = reduction_of(opts.reduceOp)

        def live(mesh: Mesh) -> None:
            row = flat(tensors[0]).clone()
            collectives.all_reduce(mesh, row, reduction)
            if mesh.rank == opts.rootRank:
                give_back(row, tensors[0])

        return self._start(tensors, live, wait=_waits(opts))

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        """Give each rank the tensor this one has for it, and get one from each."""

        def live(mesh: Mesh) -> None:
            rows = [flat(out) for out in outs]
            collectives.all_to_all(mesh, rows, [flat(tensor) for tensor in tensors])
            for row, out in zip(rows, outs, strict=True):
                give_back(row, out)

        return self._start(outs, live, lambda: sandbox.pair(outs, tensors), wait=_waits(opts))

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Give each rank its part of a tensor, and get one part from each."""

        def split(whole: torch.Tensor, sizes: Sequence[int]) -> Tensors:
            row = flat(whole)
            if not sizes:
                return _parts(row, self.size())
            width = row.numel() // max(1, whole.shape[0])
            return list(torch.split(row, [size * width for size in sizes]))

        def live(mesh: Mesh) -> None:
            whole = flat(out)
            parts = split(whole.view(out.shape), out_sizes)
            collectives.all_to_all(mesh, parts, split(tensor, in_sizes))
            give_back(whole, out)

        return self._start([out], live, lambda: sandbox.repeat_into(out, tensor), wait=_waits(opts))

    alltoall_base = all_to_all_single

    # --- messages ---------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group."""
        return self._message(tensors, dst, tag, outgoing=True)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group."""
        return self._message(tensors, src, tag, outgoing=False)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank of the group."""
        return self._message(tensors, ANY, tag, outgoing=False)

    def _message(self, tensors: Tensors, peer: int, tag: int, *, outgoing: bool) -> Work:
        world = self._world()
        if world is None:
            if not outgoing:
                sandbox.blank(tensors)
            return Answered(tensors, (self.rank() + 1) % self.size() if peer == ANY else peer)
        message = Message(
            tensors[0],
            world=world,
            outgoing=outgoing,
            peer=peer,
            tag=tag,
            timeout_s=self.timeout_s,
        )
        message.strict = self.strict
        return self._post.post(message)

    def _world(self) -> World | None:
        """Return the world that messages go through; None if they are answered here.

        It may be revoked after the look at the mode. Raises `Interrupted` where that is refused.
        """
        if self._is_answered():
            return None
        try:
            return self._fabric.present()
        except Interrupted:
            if self.strict or not self._fabric.attempt_open:
                raise
            return None

    def splitGroup(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: groups are made with `new_group`."""
        msg = "split_group is not supported: make the group with new_group"
        raise ConfigError(msg)


def _waits(opts: Any) -> bool:
    """Return whether the caller waits for the collective, so that it may run in his thread."""
    return opts is not None and not opts.asyncOp


def _parts(row: torch.Tensor, count: int) -> Tensors:
    width = row.numel() // count
    if width * count != row.numel():
        msg = f"a tensor of {row.numel()} elements cannot be split over {count} ranks"
        raise ConfigError(msg)
    return [row[i * width : (i + 1) * width] for i in range(count)]
