"""All sockets of one process: how links come to be, and how they end."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from tmover.comm.dial import dial
from tmover.comm.frame import Header, Kind
from tmover.comm.handoffs import Handoffs
from tmover.comm.handshake import Hello
from tmover.comm.latch import Latch
from tmover.comm.link import Link, look_after
from tmover.comm.listener import Key, Listener
from tmover.comm.opener import Identity, Opener, hello_to
from tmover.comm.rendezvous import Rendezvous
from tmover.comm.timeouts import Timeouts
from tmover.comm.watch import Loss, Watch
from tmover.comm.world import RENDEZVOUS, STATE, Lane, Peer, Wanted, World, message_lanes
from tmover.errors import Interrupted


class Wiring:
    """Opens links for worlds, groups and state, and closes them."""

    def __init__(
        self,
        identity: Identity,
        timeouts: Timeouts,
        *,
        nearby: bool,
        check: Callable[[Hello], str],
        on_word: Callable[[Peer, Header], None],
        on_lost: Callable[[Sequence[Loss]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._identity = identity
        self._timeouts = timeouts
        self._listener = Listener(
            identity.address,
            secret=identity.secret,
            check=check,
            handshake_s=timeouts.handshake_s,
        )
        self._opener = Opener(identity, self._listener, timeouts, nearby=nearby)
        self._handoffs = Handoffs()
        self._made: Counter[str] = Counter()
        self.rendezvous = Rendezvous()
        self._watch = Watch(on_word=on_word, on_lost=on_lost, on_failure=on_failure)

    @property
    def endpoint(self) -> str:
        """Where other processes find this one."""
        return self._listener.endpoint

    @property
    def opened(self) -> int:
        """How many links were opened so far."""
        return self._opener.opened

    @property
    def live(self) -> int:
        """How many links are in anybody's hands now."""
        return len(self._opener.links)

    def wake(self) -> None:
        """Let everybody who waits for a link look at his latch."""
        self._listener.kick()
        self.rendezvous.wake()

    # --- opening ----------------------------------------------------------------------------------

    def open(self, world: World, groups: Collection[str], *, timeout_s: float) -> None:
        """Open the links to fresh peers, and listen to what they say."""
        self._opener.open_ahead(
            list(world.foreseen(groups)),
            list(world.needed()),
            epoch=world.epoch,
            latch=world.latch,
            timeout_s=timeout_s,
        )
        for peer in world.fresh:
            self._watch.add(peer)

    def complete(
        self, wanted: Sequence[Wanted], *, epoch: int, latch: Latch, timeout_s: float | None = None
    ) -> None:
        """Open links that turned out to be needed only now."""
        self._opener.open_all(
            wanted,
            epoch=epoch,
            latch=latch,
            timeout_s=self._timeouts.collective_s if timeout_s is None else timeout_s,
        )

    def meet(self, world: World, *, timeout_s: float) -> None:
        """Open what the members of a world build communicators over, as far as it is missing."""
        peers = [peer for peer in world.peers.values() if RENDEZVOUS not in peer.lanes]
        wanted = [Wanted(peer, RENDEZVOUS) for peer in peers]
        self.complete(wanted, epoch=world.epoch, latch=world.latch, timeout_s=timeout_s)
        for peer in peers:
            self.rendezvous.join(peer)

    def outgoing(self, world: World, peer: Peer, group: str, *, deadline: float) -> Link:
        """Return the link for this group's messages to a peer, opened if need be."""
        lane, _ = message_lanes(group)
        return peer.lanes.get(lane) or self._opener.dial(
            Wanted(peer, lane), epoch=world.epoch, latch=world.latch, deadline=deadline
        )

    def incoming(self, peer: Peer, group: str) -> Link | None:
        """Return the link for this group's messages from a peer, if that has opened it yet."""
        sent, received = message_lanes(group)
        peer.bury(received)
        return peer.lanes.get(received) or self._opener.pick_up(Wanted(peer, received), sent)

    def on_message_link(self, group: str, callback: Callable[[], None]) -> None:
        """Call back when somebody has opened a link for this group's messages."""
        self._listener.subscribe(group, message_lanes(group)[0].use, callback)

    def off_message_link(self, group: str) -> None:
        """Call nobody back for this group any more."""
        self._listener.unsubscribe(group, message_lanes(group)[0].use)

    # --- state ------------------------------------------------------------------------------------

    def connect_state(
        self, uid: str, endpoint: str, *, epoch: int, timeout_s: float, lane: Lane = STATE
    ) -> socket.socket:
        """Return a blocking socket to `uid`, over which to hand over state for `epoch`."""
        sock = dial(
            endpoint,
            hello_to(uid, lane, epoch, self._identity),
            secret=self._identity.secret,
            source=self._identity.address,
            latch=self._handoffs.latch(epoch),
            deadline=time.monotonic() + timeout_s,
        )
        return self._hand_out(sock, epoch)

    def accept_state(
        self, uid: str, *, epoch: int, timeout_s: float, lane: Lane = STATE
    ) -> socket.socket:
        """Return the other end of `connect_state`. Raises `TimeoutError`, a `LinkError` too."""
        sock = self._listener.take(
            Key(lane.group, lane.use, uid),
            since=epoch,
            latch=self._handoffs.latch(epoch),
            deadline=time.monotonic() + timeout_s,
        )
        return self._hand_out(sock, epoch)

    def is_handoff_over(self, epoch: int) -> bool:
        """Return whether nothing is handed over for `epoch` any more."""
        try:
            self._handoffs.latch(epoch)
        except Interrupted:
            return True
        return False

    def end_handoffs(self, epoch: int, reason: str) -> None:
        """Wake whoever connects, waits, sends or receives to hand over state for `epoch`."""
        self._handoffs.end(epoch, reason)
        self.wake()

    def end_handoffs_before(self, epoch: float, reason: str) -> None:
        """Do so for every epoch below this one."""
        self._handoffs.end_before(epoch, reason)
        self.wake()

    def _hand_out(self, sock: socket.socket, epoch: int) -> socket.socket:
        """Make a connection ready for state. A receiver may stop to think for up to `state_s`."""
        timeouts = self._timeouts
        sock.settimeout(timeouts.state_s)
        look_after(sock, timeouts, unacked_s=max(timeouts.state_s, timeouts.unacked_s))
        return self._handoffs.keep(epoch, sock)

    def sever(self) -> None:
        """Break every link, as a network that fails would: an injected fault."""
        for link in list(self._opener.links):
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)

    # --- closing ----------------------------------------------------------------------------------

    def drop(self, peers: Iterable[Peer], *, epoch: int) -> None:
        """Say farewell to peers, and close the links to them."""
        for peer in peers:
            peer.say(Kind.BYE, epoch)
            self._watch.remove(peer)
            self.rendezvous.leave(peer)
            peer.close()

    def discard(self, unwanted: Callable[[str, int], bool]) -> None:
        """Close arrived links that nobody took, if `unwanted(uid, epoch)` says so."""
        self._listener.discard(lambda key, epoch: unwanted(key.peer, epoch))

    def new_name(self, group: str) -> str:
        """Return what a group is called among processes, where a name is used only once.

        For every group that the script makes, also of other ranks: then all count the same.
        """
        self._made[group] += 1
        return group if self._made[group] == 1 else f"{group}#{self._made[group]}"

    def forget_names(self) -> None:
        """Let all names come again: what was called by them is gone, and nothing was sent yet."""
        self._made.clear()

    def end_group(self, group: str, links: Iterable[Link]) -> None:
        """Close the links of a group that is destroyed, and those that nobody took."""
        for link in links:
            link.close()
        self._listener.discard(lambda key, _epoch: key.group == group)

    def close(self) -> None:
        """End the threads and close every socket."""
        self._watch.close()
        self.rendezvous.close()
        self._listener.close()
        for link in list(self._opener.links):
            link.close()

    def close_in_child(self) -> None:
        """Close the copies of all sockets in a process forked from this one."""
        self._listener.close_in_child()
        self._watch.close_in_child()
        self.rendezvous.close_in_child()
        for link in list(self._opener.links):
            link.close()
