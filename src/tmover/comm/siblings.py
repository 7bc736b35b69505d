"""Communication inside the node, for real, between the workers of a standby that rehearse one slot.

They are no world of the job: their links are of epoch 0, which is over with the first world, and
bear names that no group of a world has. Each rehearsal is a *round* with links of its own, so that
what one round has left behind means nothing to the next.

What goes wrong here harms nobody: for the rest of the round answers are then made up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tmover.comm import sandbox
from tmover.comm.carrier import Carrier, OverLinks
from tmover.comm.inbox import Message
from tmover.comm.latch import Latch
from tmover.comm.mesh import Mesh
from tmover.comm.p2p import Post
from tmover.comm.wiring import Wiring
from tmover.comm.work import Work
from tmover.comm.world import Wanted, World
from tmover.core.events import Member, Plan
from tmover.core.recorded import crosses
from tmover.errors import LinkError

logger = logging.getLogger(__name__)

_EPOCH = 0
"""Below that of every world: whatever comes too late is refused."""


class Named(Protocol):
    """Who a worker is."""

    @property
    def worker(self) -> str:
        """Its name: that of its agent, and its local rank."""

    @property
    def nproc(self) -> int:
        """How many workers its node has."""


class Siblings:
    """The workers of this node, as one of them sees them."""

    def __init__(self, wiring: Wiring, own: Named, *, patience_s: float) -> None:
        self._wiring = wiring
        self._uid = own.worker
        self._nproc = own.nproc
        self._patience_s = patience_s
        self._known = threading.Condition()
        self._endpoints: tuple[str, ...] = ()
        self._round = 0
        self._slot = 0
        self._world: World | None = None
        self._posts: dict[str, Post] = {}
        self._lock = threading.RLock()
        self.trouble = ""
        """Why they do not speak to each other in this round, "" while they do."""
        self.spoke = False
        """Whether anything was carried between them in this round."""
        self.attempt_open = True
        """What is given up here is answered: see `p2p.Ground`."""
        self.fault: Exception | None = None

    @property
    def wiring(self) -> Wiring:
        """All sockets of this process."""
        return self._wiring

    def hear(self, endpoints: Sequence[str]) -> None:
        """Take note of where the workers of this node listen, by local rank."""
        with self._known:
            self._endpoints = tuple(endpoints)
            self._known.notify_all()

    # --- rounds -----------------------------------------------------------------------------------

    def begin(self, slot: int) -> None:
        """Begin a round, as the ranks of a slot. All siblings begin as many."""
        self._end("the next rehearsal has begun")
        with self._lock:
            self._round += 1
            self._slot, self.trouble, self.spoke = slot, "", False

    def close(self) -> None:
        """End the round: this process is to be a rank of the job."""
        self._end("the rehearsal is over")

    def _end(self, reason: str) -> None:
        with self._lock:
            world, self._world = self._world, None
            posts, self._posts = self._posts, {}
            self.trouble = self.trouble or reason
        if world is not None:
            world.revoke(reason)
        for post in posts.values():
            post.close()
        for peer in world.peers.values() if world is not None else ():
            peer.close()

    def give_up(self, reason: str) -> None:
        """Speak to no sibling any more in this round; whoever waits for one goes on."""
        with self._lock:
            world, is_first = self._world, not self.trouble
            self.trouble = self.trouble or reason
        if is_first:
            logger.warning("inside the node answers are made up from here on: %s", reason)
        if world is not None:
            world.revoke(reason)

    # --- what they carry --------------------------------------------------------------------------

    def carries(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are all among the siblings, and these speak to each other."""
        together = len(ranks) > 1 and not crosses(ranks, self._nproc)
        return together and ranks[0] // self._nproc == self._slot and not self.trouble

    def carry(self, name: str, ranks: Sequence[int], ask: Callable[[Carrier], None]) -> bool:
        """Carry a collective out; return False if it came to nothing."""
        try:
            mesh = self._mesh(name, ranks)
            with torch.no_grad():
                ask(OverLinks(mesh))
        except Exception as error:  # noqa: BLE001 - whatever it is, the rehearsal goes on without
            self.give_up(str(error) or repr(error))
            return False
        self.spoke = True
        return True

    def message(
        self, name: str, ranks: Sequence[int], tensor: torch.Tensor, *, peer: int, tag: int,
        outgoing: bool,
    ) -> Work | None:  # fmt: skip
        """Send a tensor to a sibling, or receive one; `peer` is its rank in the group.

        Returns None if it came to nothing.
        """
        try:
            world = self._enter()
        except LinkError as error:
            self.give_up(str(error))
            return None
        message = _Near(
            tensor,
            world=world,
            outgoing=outgoing,
            peer=peer,
            tag=tag,
            timeout_s=self._patience_s,
        )
        message.siblings = self
        with self._lock:
            called = self._name(name)
            post = self._posts.get(called)
            if post is None:
                post = self._posts[called] = Post(self, called, tuple(ranks))
        self.spoke = True
        return post.post(message)

    def _name(self, group: str) -> str:
        return f"{group}~{self._round}"

    def _mesh(self, group: str, ranks: Sequence[int]) -> Mesh:
        world, name = self._enter(), self._name(group)
        mesh = world.meshes.get(name)
        if mesh is None:
            mesh = world.bind_group(name, ranks, self._complete)
        mesh.timeout_s = self._patience_s
        return mesh

    def _complete(self, wanted: Sequence[Wanted], *, epoch: int, latch: Latch) -> None:
        self._wiring.complete(wanted, epoch=epoch, latch=latch, timeout_s=self._patience_s)

    def _enter(self) -> World:
        """Return the round's world. Raises `LinkError` if nobody says where the siblings are."""
        with self._lock:
            if self._world is None:
                plan = Plan(epoch=_EPOCH, members=self._members())
                world = World(plan, self._uid, burnt=(), timeout_s=self._patience_s)
                world.populate({}, self._uid, None)
                self._world = world
            return self._world

    def _members(self) -> tuple[Member, ...]:
        agent = self._uid.rpartition("/")[0]
        deadline = time.monotonic() + self._patience_s
        with self._known:
            self._known.wait_for(
                lambda: bool(self._endpoints), max(0.0, deadline - time.monotonic())
            )
            endpoints = self._endpoints
        if len(endpoints) != self._nproc:
            msg = f"the agent did not say where its workers listen within {self._patience_s:g} s"
            raise LinkError(msg)
        first = self._slot * self._nproc
        return tuple(
            Member(rank=first + local, worker=f"{agent}/{local}", node=agent, endpoint=endpoint)
            for local, endpoint in enumerate(endpoints)
        )

    # --- what a post of theirs tells --------------------------------------------------------------

    def observe(self, epoch: int, peers: tuple[str, ...], reason: str) -> None:
        """Take note that a link to a sibling broke."""
        self.give_up(reason)

    def revoke(self, epoch: int, reason: str) -> None:
        """Take note that a message was given up."""
        self.give_up(reason)


class _Near(Message):
    """A message between siblings. It always ends well: with what was sent, or with an answer."""

    siblings: Siblings

    def conclude(self, error: Exception | None = None) -> None:
        """Let who waits know that it is done."""
        if error is not None and not self.is_completed():
            self.siblings.give_up(str(error))
            if not self.outgoing:
                with torch.no_grad():
                    sandbox.invent([self._tensor])
        super().conclude()
