"""The process group that torch, DDP and the user hold for ever, whatever process holds a rank.

C++ calls some of the methods here, Python the others, both by these names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from tmover.bounds import LONGEST_S
from tmover.comm import sandbox
from tmover.comm.carrier import Carrier, OverLinks, Tensors
from tmover.comm.checks import Checks
from tmover.comm.fabric import Fabric, Mode
from tmover.comm.fifo import Fifo
from tmover.comm.inbox import ANY, Answered, Message
from tmover.comm.launch import Launches
from tmover.comm.mode import Rehearsal
from tmover.comm.named import NamedGroup
from tmover.comm.p2p import Post
from tmover.comm.tensors import device_of, plain
from tmover.comm.untraced import untraced
from tmover.comm.work import Work
from tmover.comm.world import World
from tmover.errors import CallError, ConfigError, Interrupted, LinkError

logger = logging.getLogger(__name__)

Ask = Callable[[Carrier], None]
"""Asks a carrier for one collective."""
_UNSET = timedelta(0)


@untraced
class TmoverGroup(NamedGroup):
    """Runs collectives over the fabric, and answers them where there are no peers."""

    def __init__(
        self, fabric: Fabric, name: str, ranks: Sequence[int], *, rank: int, **identity: Any
    ) -> None:
        super().__init__(fabric, name, ranks, rank=rank, **identity)
        self._checks = Checks(self)
        self._fifo = Fifo(f"tmover-group-{name}")
        self._post = Post(fabric, self.wire_name, self.ranks)
        self._launches = Launches(fabric, self.wire_name, self.ranks)
        self._destroyed = False
        fabric.groups[self.wire_name] = self
        fabric.generation.created()

    def rebind(self, rank: int, ranks: Sequence[int], wire_name: str) -> None:
        """Hold another rank of the world. Only before the first world: nothing was sent yet."""
        super().rebind(rank, ranks, wire_name)
        self._post.close()
        self._post = Post(self._fabric, wire_name, self.ranks)
        self._launches = Launches(self._fabric, wire_name, self.ranks)

    # --- life -------------------------------------------------------------------------------------

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; return whether that is so."""
        own = self._fifo.settle(timeout_s) and self._post.settle(timeout_s)
        return own and self._launches.settle(timeout_s)

    def settle_messages(self, timeout_s: float) -> bool:
        """Wait until no message over links is under way; return whether that is so."""
        return self._post.settle(timeout_s)

    def stray(self, ended: Collection[int]) -> str:
        """Return a message under way of which no end is with any but these ranks, "" if none."""
        return self._post.stray(ended)

    def close(self) -> None:
        """End this group's threads."""
        self._post.close()
        self._fifo.close()
        self._launches.close()

    def shutdown(self) -> None:
        """Leave the group (`destroy_process_group`)."""
        self._leave("")

    def abort(self) -> None:
        """Leave the group at once; a broken world ends what is under way on links by itself."""
        self._leave("the group was aborted")

    def _leave(self, reason: str) -> None:
        self._destroyed = True
        fabric, name = self._fabric, self.wire_name
        fabric.groups.pop(name, None)
        fabric.generation.leave(name, reason)
        self.close()
        fabric.wiring.end_group(name, fabric.worlds.forget(name))

    # --- how every collective runs ----------------------------------------------------------------

    def _start(self, result: Any, ask: Ask, opts: Any, *, like: Any = None) -> Work:
        """Have a collective carried out by whatever carries them now; `like` tells the device."""
        device = device_of(result or like, opts)
        stocked = self._fabric.generation.carries(self.wire_name, device)
        if self._is_answered():
            return self._rehearse(result, ask, opts)
        if stocked:
            return self._launches.start(
                result,
                ask,
                lambda: self._answer(ask),
                device=device,
                strict=self.strict,
                timeout_s=self.timeout_s,
            )
        strict, waits = self.strict, not getattr(opts, "asyncOp", True)
        mode = torch.is_inference_mode_enabled()  # the group's thread has one of its own

        def job() -> Exception | None:
            with torch.inference_mode(mode):
                return self._perform(ask, opts, strict=strict, told=waits)

        work = Work(result, job)
        if waits:
            self._fifo.run(work)
        else:
            self._fifo.submit(work)
        return work

    def _rehearse(self, result: Any, ask: Ask, opts: Any) -> Work:
        """Answer a collective here: in a rehearsal as well as that knows how, else anyhow."""
        rehearsal = self._rehearsal()
        if rehearsal is None:
            self._answer(ask)
            return Work(result)
        job = rehearsal.answer(self, ask)
        if job is None:
            return Work(result)
        work = Work(result, job)
        (self._fifo.submit if getattr(opts, "asyncOp", True) else self._fifo.run)(work)
        return work

    def _rehearsal(self) -> Rehearsal | None:
        fabric = self._fabric
        is_tried = fabric.witness is not None  # both runs of a trial are answered alike
        return None if is_tried or fabric.mode is not Mode.SANDBOX else fabric.rehearsal

    def _answer(self, ask: Ask) -> None:
        carrier, witness = sandbox.Answers(self.rank()), self._fabric.witness
        with torch.no_grad():
            ask(carrier if witness is None else witness.over(carrier, self.ranks))

    def _is_answered(self) -> bool:
        """Return whether collectives are answered here; raise if they are refused."""
        fabric = self._fabric
        if self._destroyed:
            msg = f"group {self._name} was destroyed"
            raise CallError(msg)
        if fabric.refusal:
            raise ConfigError(fabric.refusal)
        if fabric.caution:
            caution, fabric.caution = fabric.caution, ""
            logger.warning("%s", caution)
        if fabric.mode is Mode.REVOKED and (self.strict or not fabric.attempt_open):
            msg = "the world is revoked: this attempt will not be kept"
            raise Interrupted(msg)
        return fabric.mode is not Mode.LIVE

    def _perform(self, ask: Ask, opts: Any, *, strict: bool, told: bool) -> Exception | None:
        """Carry a collective out; return what went wrong, if anybody is to know.

        `told`: the caller waits, so that he will. C++ looks at the result alone; then the next vote
        raises it.
        """
        fabric = self._fabric
        epoch = fabric.epoch
        try:
            world = fabric.present()
            epoch = world.epoch
            mesh = fabric.mesh(world, self.wire_name)
            mesh.timeout_s = self._timeout_s(opts)
            with torch.no_grad():
                ask(OverLinks(mesh))
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
        self._answer(ask)
        return None

    def _timeout_s(self, opts: Any) -> float:
        """Return how long a collective may take: what its call says, else what the group does."""
        given: timedelta = getattr(opts, "timeout", _UNSET)
        return min(given.total_seconds(), LONGEST_S) if given > _UNSET else self.timeout_s

    # --- collectives ------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over all ranks. `opts` may be the operation itself."""
        options = opts if opts is not None else dist.AllreduceOptions()
        if isinstance(options, dist.ReduceOp):
            options = dist.AllreduceOptions()
            options.reduceOp = opts
        self._checks.allreduce(tensors, options.reduceOp)
        return self._start(tensors, lambda carrier: carrier.allreduce(tensors, options), options)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over all ranks."""
        options = opts if opts is not None else dist.AllreduceCoalescedOptions()
        self._checks.coalesced(tensors, options.reduceOp)
        return self._start(tensors, lambda carrier: carrier.allreduce(tensors, options), options)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Make each tensor that of the root."""
        self._checks.broadcast(tensors, opts.rootRank)
        return self._start(tensors, lambda carrier: carrier.broadcast(tensors, opts), opts)

    def allgather(self, outs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        """Gather each tensor from all ranks into a list."""
        self._checks.allgather(outs, tensors)
        result = outs[0] if len(outs) == 1 else outs
        return self._start(result, lambda carrier: carrier.allgather(outs, tensors, opts), opts)

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Gather a tensor from all ranks into one."""
        return self.all_gather_single_coalesced([out], [tensor], opts)

    def all_gather_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> Work:
        """Gather each tensor from all ranks into one."""
        self._checks.all_gather_single(outs, tensors)
        return self._start(
            outs, lambda carrier: carrier.all_gather_single_coalesced(outs, tensors, opts), opts
        )

    def allgather_coalesced(self, outs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        """Gather several tensors; `outs[r]` are those of rank r."""
        turned = self._checks.turned(outs, tensors)
        return self._start(outs, lambda carrier: carrier.allgather(turned, tensors, opts), opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> Work:
        """Reduce lists of tensors over all ranks; each rank gets its place in them."""
        self._checks.reduce_scatter(outs, tensors, opts.reduceOp)
        return self._start(outs, lambda carrier: carrier.reduce_scatter(outs, tensors, opts), opts)

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        """Reduce a tensor over all ranks; each rank gets its part."""
        return self.reduce_scatter_single_coalesced([out], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> Work:
        """Reduce several tensors over all ranks; each rank gets its part of each."""
        self._checks.reduce_scatter_single(outs, tensors, opts.reduceOp)
        return self._start(
            outs, lambda carrier: carrier.reduce_scatter_single_coalesced(outs, tensors, opts), opts
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Work:
        """Return once every rank has come here."""
        return self._start([], lambda carrier: carrier.barrier(opts), opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: Any = None
    ) -> None:
        """Return once every rank has come here. Whoever does not come is named."""
        options = dist.BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        self.barrier(options).wait()

    def gather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> Work:
        """Gather a tensor from all ranks, on the root."""
        self._checks.gather(outs, tensors, opts.rootRank)
        result = outs[0] if outs else []
        return self._start(
            result, lambda carrier: carrier.gather(outs, tensors, opts), opts, like=tensors
        )

    def scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any) -> Work:
        """Give each rank the tensor that the root has for it."""
        self._checks.scatter(outs, tensors, opts.rootRank)
        return self._start(outs, lambda carrier: carrier.scatter(outs, tensors, opts), opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce a tensor over all ranks, on the root."""
        self._checks.reduce(tensors, opts.reduceOp, opts.rootRank)
        return self._start(tensors, lambda carrier: carrier.reduce(tensors, opts), opts)

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        """Give each rank the tensor this one has for it, and get one from each."""
        self._checks.alltoall(outs, tensors)
        return self._start(outs, lambda carrier: carrier.alltoall(outs, tensors, opts), opts)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Give each rank its part of a tensor, and get one part from each."""
        self._checks.all_to_all_single(out, tensor, out_sizes, in_sizes)
        return self._start(
            [out],
            lambda carrier: carrier.all_to_all_single(out, tensor, out_sizes, in_sizes, opts),
            opts,
        )

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
        tensors = [plain(tensor) for tensor in tensors]
        self._checks.message("send" if outgoing else "recv", tensors, peer, tag)
        device = device_of(tensors, None)
        stocked = self._fabric.generation.carries(self.wire_name, device)
        world = self._world()
        if world is None:
            if (rehearsal := self._rehearsal()) is not None:
                return rehearsal.message(self, tensors, peer, tag, outgoing=outgoing)
            if not outgoing:
                sandbox.invent(tensors)
            elif self._fabric.witness is not None:
                self._fabric.witness.note("send", (self.ranks[peer],), [tag, tensors])
            return Answered(tensors, self._source(peer))
        if stocked:
            return self._launches.start(
                tensors,
                lambda carrier: carrier.message(tensors, peer, tag, outgoing=outgoing),
                lambda: None if outgoing else sandbox.invent(tensors),
                device=device,
                strict=self.strict,
                timeout_s=self.timeout_s,
                source=self._source(peer),
            )
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

    def _source(self, peer: int) -> int:
        """Return whom a message is said to be from; whichever rank is the next one."""
        return (self.rank() + 1) % self.size() if peer == ANY else peer

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
