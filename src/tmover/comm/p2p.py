"""Send and receive between two ranks of a group, with tags, in any order.

Whoever waits for a message moves all of its group; where nobody waits, a thread of the group does,
so that two ranks that both send first do not wait for each other. A sender dials a link of its own
to each receiver: neither has to wait until the other one thinks of it.
"""

from __future__ import annotations

import math
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
_GRACE_S = 0.002
"""The thread leaves messages for so long to those who may be about to wait for them."""
_ACTIVE_S = 0.1
"""It looks after them that often until there have been none for so long."""


class Post:
    """The messages of one group. Private methods below `_turn` are called by whoever drives."""

    def __init__(self, fabric: Fabric, name: str, ranks: tuple[int, ...]) -> None:
        self._fabric = fabric
        self._name = name
        self._ranks = ranks
        self._bell = Bell()
        self._changed = threading.Condition()
        self._posted: _Box = deque()
        self._open = 0
        self._driven = False
        """Whether somebody drives."""
        self._waiters = 0
        """How many want to drive."""
        self._turns = 0
        self._idle = True
        """Whether the thread sleeps until it is told."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._time_up = False
        """Whether nothing has come in the time that messages have."""
        self._world: World | None = None
        self._outgoing: dict[int, _Box] = {}
        self._sends: dict[int, Send] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._from_any: Shelf[Message] = Shelf()

    def post(self, message: Message) -> Message:
        """Send or receive a message: as far as it goes now, the rest when somebody drives."""
        message.drive = self.drive
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
            free = not self._driven
            self._driven = True
        if not free:
            self._bell.ring()
            return message
        try:
            self._turn()
        finally:
            self._leave()
        return message

    def drive(self, message: Message, timeout_s: float | None) -> bool:
        """Move messages until this one is done; return whether it is before the time is up."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not message.is_completed():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._enter_turn(message, min(left, threading.TIMEOUT_MAX)):
                try:
                    while not message.is_completed() and time.monotonic() < deadline:
                        self._wait(deadline)
                        self._turn()
                finally:
                    self._leave()
        return True

    def settle(self, timeout_s: float) -> bool:
        """Wait until no message is under way; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def close(self) -> None:
        """Give up what is under way, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._bell.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._bell.close()

    # --- who drives -------------------------------------------------------------------------------

    def _enter_turn(self, message: Message, timeout_s: float) -> bool:
        """Become who drives, unless the message is done first or the time is up."""
        with self._changed:
            self._waiters += 1
            if self._driven:
                self._bell.ring()
            self._changed.wait_for(lambda: message.is_completed() or not self._driven, timeout_s)
            self._waiters -= 1
            if self._driven or message.is_completed():
                return False
            self._driven = True
            return True

    def _leave(self) -> None:
        with self._changed:
            self._driven = False
            if (self._idle and self._open) or self._waiters:
                self._changed.notify_all()

    def _serve(self) -> None:
        """Drive when nobody else has for a while: whoever waits for a message does it himself."""
        active = 0.0
        while True:
            with self._changed:
                if self._open:
                    active = time.monotonic()
                elif time.monotonic() - active > _ACTIVE_S:
                    self._idle = True
                    self._changed.wait_for(lambda: self._closed or self._open)
                    self._idle = False
                turns = self._turns
                self._changed.wait_for(lambda: self._closed, _GRACE_S)
                if self._driven or not (self._closed or (self._open and self._turns == turns)):
                    continue
                self._driven = True
            try:
                while self._turn() and not self._waiters and self._open:
                    self._wait(math.inf)
            finally:
                self._leave()
            if self._closed:
                return

    # --- a turn -----------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Move everything as far as it goes without waiting. Return False once it is closed."""
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
        except Exception as error:  # noqa: BLE001 - whoever drives may be somebody else: `exchange` raises it
            self._fabric.fault = error
            self._give_up(repr(error))
        if closed:
            self._give_up("the group is closed")
        self._count()
        return not closed

    def _epoch(self) -> int:
        return self._world.epoch if self._world is not None else 0

    def _count(self) -> None:
        under_way = len(self._under_way())
        with self._changed:
            self._turns += 1
            self._open = under_way + len(self._posted)
            if self._waiters or not self._open:
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
            self._outgoing.setdefault(message.peer, deque()).append(message)
        elif message.peer != ANY:
            self._inbox(message.peer).ask(message)
        elif not any(self._inbox(rank).ask(message) for rank in range(len(self._ranks))):
            self._from_any.put(message.tag, message)

    def _inbox(self, rank: int) -> Inbox:
        if rank not in self._inboxes:
            self._inboxes[rank] = Inbox(rank, self._from_any.take)
        return self._inboxes[rank]

    def _enter(self, world: World) -> None:
        self._world = world
        self._outgoing.clear()
        self._inboxes.clear()

    def _advance(self) -> None:
        """Move everything as far as it goes without waiting."""
        world = self._world
        if world is None:
            return
        if world.latch.is_set:
            raise Interrupted(world.latch.reason)
        if self._time_up:
            self._look_for_late(world)
        for rank, box in self._outgoing.items():
            while box and self._sent(rank, box[0], world):
                box.popleft().conclude()
        for rank, inbox in self._inboxes.items():
            link = self._incoming_link(rank, world) if self._wanted(inbox) else None
            while link is not None and self._wanted(inbox):
                if not inbox.read(link, world.epoch, world.burnt):
                    break

    def _look_for_late(self, world: World) -> None:
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
            self._inbox(rank).put(message.tag, bytearray(data))
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

    def _wait(self, deadline: float) -> None:
        """Wait until something can go on, or the time is up."""
        poller = select.poll()
        poller.register(self._bell.fd, select.POLLIN)
        world, messages = self._world, self._under_way()
        if world is None or not messages:
            return
        poller.register(world.latch.fd, select.POLLIN)
        for send in self._sends.values():
            poller.register(send.link.fd, select.POLLOUT)
        for rank, inbox in self._inboxes.items():
            link = self._incoming_link(rank, world) if self._wanted(inbox) else None
            if link is not None:
                poller.register(link.fd, select.POLLIN)
        left = min(deadline, *(message.deadline for message in messages)) - time.monotonic()
        events = poller.poll(max(0.0, left) * 1000 + 1)
        self._time_up = left <= 0 or not events
        self._bell.clear(seen=any(fd == self._bell.fd for fd, _ in events))
