"""The messages of one group in one world: what is asked for, what is sent, and how far it has gone.

Nothing here waits, and one thread at a time moves it.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Iterator

from tmover.comm.frame import Kind, Op, Stamp
from tmover.comm.inbox import ANY, Inbox, Message
from tmover.comm.link import Link
from tmover.comm.shelf import Shelf
from tmover.comm.transfer import Send
from tmover.comm.wiring import Wiring
from tmover.comm.world import Peer, World
from tmover.errors import Interrupted, LinkError


class Routes:
    """All messages of a group, by the rank at their other end."""

    def __init__(self, wiring: Wiring, name: str, ranks: tuple[int, ...], world: World) -> None:
        self.world = world
        self._wiring = wiring
        self._name = name
        self._ranks = ranks
        self._routes: dict[int, Route] = {}
        self._from_any: Shelf[Message] = Shelf()

    def take_on(self, message: Message) -> None:
        """Begin with a message."""
        if message.outgoing:
            self._route(message.peer).outgoing.append(message)
        elif message.peer != ANY:
            self._route(message.peer).inbox.ask(message)
        elif not any(self._route(rank).inbox.ask(message) for rank in range(len(self._ranks))):
            self._from_any.put(message.tag, message)

    def advance(self) -> None:
        """Move everything as far as it goes. Raises what breaks a collective too."""
        if self.world.latch.is_set:
            raise Interrupted(self.world.latch.reason)
        eager = bool(self._from_any)
        for route in self._routes.values():
            route.advance(eager=eager)

    def look_for_late(self, now: float) -> None:
        """Raise `LinkError` if a message has had its time."""
        late = [message for message in self.under_way() if message.deadline < now]
        if late:
            uids = tuple(sorted({message.other.uid for message in late if message.other}))
            msg = f"no message to or from {', '.join(uids) or 'any rank'} in time"
            raise LinkError(msg, uids)

    def watch(self, poller: select.poll) -> None:
        """Let a poller look after what can go on."""
        poller.register(self.world.latch.fd, select.POLLIN)
        eager = bool(self._from_any)
        for route in self._routes.values():
            route.watch(poller, eager=eager)

    def under_way(self) -> Iterator[Message]:
        """Return all messages that are not through."""
        for route in self._routes.values():
            yield from route.outgoing
            yield from route.inbox.waiting()
        yield from self._from_any

    def __len__(self) -> int:
        under_way = len(self._from_any)
        for route in self._routes.values():
            under_way += len(route.outgoing) + len(route.inbox)
        return under_way

    def abandon(self) -> None:
        """Let go of the memory of all messages."""
        for route in self._routes.values():
            for link in route.links():
                link.abandon()

    def _route(self, rank: int) -> Route:
        route = self._routes.get(rank)
        if route is None:
            peer = self.world.peers.get(self._ranks[rank])
            inbox = Inbox(rank, self._from_any.take)
            route = Route(self._wiring, self._name, self.world, peer=peer, inbox=inbox)
            self._routes[rank] = route
        return route


class Route:
    """What goes to one rank and comes from it; `peer` is None if that is this process itself."""

    def __init__(
        self, wiring: Wiring, name: str, world: World, *, peer: Peer | None, inbox: Inbox
    ) -> None:
        self.inbox = inbox
        self.outgoing: deque[Message] = deque()
        self._wiring = wiring
        self._name = name
        self._world = world
        self._peer = peer
        self._send: Send | None = None
        """The first of `outgoing`, once it has begun."""
        self._there: Link | None = None
        self._back: Link | None = None

    def advance(self, *, eager: bool) -> None:
        """Move what can be moved. `eager`: read even what nobody asked this rank for."""
        while self.outgoing and self._sent(self.outgoing[0]):
            self.outgoing.popleft().conclude()
        while (eager or self.inbox.wanted()) and (back := self._incoming()) is not None:
            if not self.inbox.read(back, self._world.epoch, self._world.burnt):
                break

    def watch(self, poller: select.poll, *, eager: bool) -> None:
        """Let a poller look after what can go on."""
        if self._send is not None:
            poller.register(self._send.link.fd, select.POLLOUT)
        if (eager or self.inbox.wanted()) and (back := self._incoming()) is not None:
            poller.register(back.fd, select.POLLIN)

    def links(self) -> list[Link]:
        """Return the links that were used."""
        return [link for link in (self._there, self._back) if link is not None]

    def _sent(self, message: Message) -> bool:
        if self._peer is None:
            self.inbox.put(message.tag, bytearray(message.data))
            return True
        if self._send is None:
            if self._there is None:
                self._there = self._wiring.outgoing(
                    self._world, self._peer, self._name, deadline=message.deadline
                )
            epoch, size = self._world.epoch, len(message.data)
            stamp = Stamp(Kind.P2P, Op.NONE, 0, epoch, message.tag, size)
            self._send = Send(self._there, stamp, message.data)
        if not self._send.step():
            return False
        self._send = None
        return True

    def _incoming(self) -> Link | None:
        if self._back is None and self._peer is not None:
            self._back = self._wiring.incoming(self._peer, self._name)
        return self._back
