"""Send and receive between two ranks of a group, with tags, in any order.

One thread per group, started with its first message, moves them all; so two ranks that both send
first do not wait for each other. A sender dials a link of its own to each receiver: neither has to
wait until the other one thinks of it.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque

import torch

from tmover.comm.fabric import Fabric
from tmover.comm.frame import Kind, Op, Stamp
from tmover.comm.inbox import ANY, Inbox, Message
from tmover.comm.latch import Bell
from tmover.comm.link import Link
from tmover.comm.shelf import Shelf
from tmover.comm.tensors import view
from tmover.comm.transfer import Send
from tmover.comm.world import Peer, World, message_lanes
from tmover.errors import Interrupted, LinkError, ProtocolError

_Box = deque[Message]


class Post:
    """The messages of one group. Private methods below `_serve` run in its thread alone."""

    def __init__(self, fabric: Fabric, name: str, ranks: tuple[int, ...]) -> None:
        self._fabric = fabric
        self._name = name
        self._ranks = ranks
        self._bell = Bell()
        self._changed = threading.Condition()
        self._posted: _Box = deque()
        self._open = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._world: World | None = None
        self._outgoing: dict[int, _Box] = {}
        self._sends: dict[int, Send] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._from_any: Shelf[Message] = Shelf()

    def post(self, message: Message) -> Message:
        """Send or receive a message in the background."""
        message.other = self._peer(message.peer, message.world)
        with self._changed:
            self._posted.append(message)
            self._open += 1
            if self._thread is None and not self._closed:
                self._fabric.wiring.on_message_link(self._name, self._bell.ring)
                self._thread = threading.Thread(
                    target=self._serve, name=f"tmover-post-{self._name}", daemon=True
                )
                self._thread.start()
        self._bell.ring()
        return message

    def settle(self, timeout_s: float) -> bool:
        """Wait until no message is under way; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def close(self) -> None:
        """Give up what is under way, and end the thread."""
        with self._changed:
            self._closed = True
        self._bell.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._bell.close()

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        closed = False
        while not closed:
            self._bell.clear()
            with self._changed:
                posted, self._posted = self._posted, deque()
                closed = self._closed
            try:
                for message in posted:
                    self._take_on(message)
                self._advance()
            except LinkError as error:
                self._fabric.observe(self._epoch(), error.peers, str(error))
                self._give_up(str(error))
            except Interrupted as error:
                self._fabric.revoke(self._epoch(), str(error))
                self._give_up(str(error))
            except ProtocolError as error:
                self._fabric.fault = error
                self._give_up(str(error))
            except Exception as error:  # noqa: BLE001 - a thread's edge: `exchange` raises it
                self._fabric.fault = error
                self._give_up(repr(error))
            if closed:
                self._give_up("the group is closed")
            self._count()
            if not closed:
                self._wait()

    def _epoch(self) -> int:
        return self._world.epoch if self._world is not None else 0

    def _count(self) -> None:
        under_way = len(self._under_way())
        with self._changed:
            self._open = under_way + len(self._posted)
            self._changed.notify_all()

    def _under_way(self) -> list[Message]:
        asked = [message for inbox in self._inboxes.values() for message in inbox.waiting()]
        sent = [message for box in self._outgoing.values() for message in box]
        return [*asked, *sent, *self._from_any]

    def _take_on(self, message: Message) -> None:
        if message.world is not self._world:
            self._give_up("the epoch is over")
            self._enter(message.world)
        if message.outgoing:
            self._outgoing[message.peer].append(message)
        elif message.peer != ANY:
            self._inboxes[message.peer].ask(message)
        elif not any(inbox.ask(message) for inbox in self._inboxes.values()):
            self._from_any.put(message.tag, message)

    def _enter(self, world: World) -> None:
        self._world = world
        ranks = range(len(self._ranks))
        self._outgoing = {rank: deque() for rank in ranks}
        self._inboxes = {rank: Inbox(rank, self._from_any.take) for rank in ranks}

    def _advance(self) -> None:
        """Move everything as far as it goes without waiting."""
        world = self._world
        if world is None:
            return
        if world.latch.is_set:
            raise Interrupted(world.latch.reason)
        for rank, box in self._outgoing.items():
            while box and self._sent(rank, box[0], world):
                box.popleft().conclude()
        for rank, inbox in self._inboxes.items():
            link = self._incoming_link(rank, world) if self._wanted(inbox) else None
            while link is not None and self._wanted(inbox):
                if not inbox.read(link, world.epoch, world.burnt):
                    break
        now = time.monotonic()
        late = [message for message in self._under_way() if message.deadline < now]
        if late:
            peers = tuple(sorted({peer.uid for m in late if (peer := self._peer(m.peer, world))}))
            msg = f"no message to or from {', '.join(peers) or 'any rank'} in time"
            raise LinkError(msg, peers)

    def _wanted(self, inbox: Inbox) -> bool:
        return inbox.wanted() or bool(self._from_any)

    def _peer(self, rank: int, world: World) -> Peer | None:
        """Return who holds a rank of the group; None if it is this process, or `ANY`."""
        return None if rank == ANY else world.peers.get(self._ranks[rank])

    def _sent(self, rank: int, message: Message, world: World) -> bool:
        peer = self._peer(rank, world)
        data = view(message.row)
        if peer is None:
            self._inboxes[rank].put(message.tag, bytearray(data))
            return True
        if rank not in self._sends:
            link = self._fabric.wiring.outgoing(world, peer, self._name, deadline=message.deadline)
            stamp = Stamp(Kind.P2P, Op.NONE, 0, world.epoch, message.tag, len(data))
            self._sends[rank] = Send(link, stamp, data)
        if not self._sends[rank].step():
            return False
        del self._sends[rank]
        return True

    def _incoming_link(self, rank: int, world: World) -> Link | None:
        peer = self._peer(rank, world)
        return None if peer is None else self._fabric.wiring.incoming(peer, self._name)

    def _give_up(self, reason: str) -> None:
        """Conclude everything under way: without a result, or with an error if anybody minds."""
        world, messages = self._world, self._under_way()
        self._world = None
        self._sends.clear()
        self._outgoing.clear()
        self._inboxes.clear()
        self._from_any.clear()
        for peer in world.peers.values() if world is not None else ():
            for lane in message_lanes(self._name):
                if lane in peer.lanes:
                    peer.lanes[lane].abandon()
        for message in messages:
            if message.strict or not self._fabric.attempt_open:
                message.conclude(Interrupted(reason))
            else:
                with torch.no_grad():
                    message.blank()

    def _wait(self) -> None:
        """Wait until something can go on."""
        poller = select.poll()
        poller.register(self._bell.fd, select.POLLIN)
        world, messages = self._world, self._under_way()
        if world is None or not messages:
            poller.poll()
            return
        poller.register(world.latch.fd, select.POLLIN)
        for send in self._sends.values():
            poller.register(send.link.fd, select.POLLOUT)
        for rank, inbox in self._inboxes.items():
            link = self._incoming_link(rank, world) if self._wanted(inbox) else None
            if link is not None:
                poller.register(link.fd, select.POLLIN)
        left = min(message.deadline for message in messages) - time.monotonic()
        poller.poll(max(0.0, left) * 1000 + 1)
