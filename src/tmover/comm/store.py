"""A `torch.distributed.Store` without a server: what one member sets, all others have."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed as dist

from tmover.comm.latch import Latch
from tmover.comm.rendezvous import Rendezvous, Until
from tmover.comm.untraced import untraced
from tmover.comm.world import Peer
from tmover.errors import ConfigError, LinkError

_Base: Any = dist.Store
_HERE, _BUILT = "here", "built"


class Call(NamedTuple):
    """What somebody is here to build: a group's communicator, for the n-th time in its epoch."""

    group: str
    device: str
    turn: int


def call_of(key: str) -> Call | None:
    """Return what a key says that somebody is here to build, None if it says something else.

    >>> call_of("dp/cpu/1/here/3")
    Call(group='dp', device='cpu', turn=1)
    >>> call_of("dp/cpu/1/store/rank_3")
    """
    parts = key.rsplit("/", 4)
    if len(parts) < 5 or parts[3] != _HERE:
        return None
    return Call(parts[0], parts[1], int(parts[2]))


def is_of(group: str, key: str) -> bool:
    """Return whether a key belongs to a store of this group.

    >>> is_of("dp", "dp/cpu/1/store/rank_3"), is_of("d", "dp/cpu/1/store/rank_3")
    (True, False)
    """
    return key.startswith(f"{group}/")


@untraced
class GroupStore(_Base):  # type: ignore[misc] # torch's stubs do not let it be subclassed
    """The store in which the members of one group build one communicator.

    It waits no longer than `until`, whatever its user would like; afterwards as long as he says.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        call: Call,
        epoch: int,
        peers: Mapping[int, Peer],
        until: Until,
    ) -> None:
        super().__init__()
        self.epoch = epoch
        self._rendezvous = rendezvous
        self._name = f"{call.group}/{call.device}/{call.turn}"
        self._peers = peers
        self._until = until
        self._after: tuple[Latch, float] | None = None
        self._keys: list[str] = []

    def meet(self, rank: int) -> None:
        """Return once every member is here, to build the same."""
        self._tell(f"{self._name}/{_HERE}/{rank}", b"")
        self._hear_all(_HERE, self._until)

    def hurry(self, limit_s: float) -> None:
        """Wait no longer than this from now on: all are here."""
        deadline = min(self._until.deadline, time.monotonic() + limit_s)
        self._until = self._until._replace(deadline=deadline)

    def say_built(self, rank: int, fault: str = "") -> None:
        """Tell every member that this one has built it, or why it could not."""
        self._tell(f"{self._name}/{_BUILT}/{rank}", fault.encode())

    def hear_built(self, until: Until) -> None:
        """Return once every other member has built it. Raises `LinkError` if one could not."""
        for fault in filter(None, self._hear_all(_BUILT, until)):
            msg = f"another rank could not build: {fault.decode()}"
            raise LinkError(msg)

    def _hear_all(self, what: str, until: Until) -> list[bytes]:
        wanted = {f"{self._name}/{what}/{place}": peer for place, peer in self._peers.items()}
        return self._rendezvous.hear(self.epoch, wanted, until=until, among=self._peers.values())

    def serve(self, after_s: float) -> None:
        """Serve what the communicator asks for later, in whatever world, for `after_s` at most."""
        self._after = Latch(), after_s

    def values(self) -> bytes:
        """Return all values that were set or read here, one after the other."""
        keys = dict.fromkeys(self._keys)
        return b"".join(self._rendezvous.hear(self.epoch, keys, until=self._limit(), among=()))

    def _limit(self) -> Until:
        if self._after is None:
            return self._until
        latch, after_s = self._after
        return Until(latch, time.monotonic() + after_s)

    def _tell(self, key: str, value: bytes) -> None:
        peers = self._peers.values()
        self._rendezvous.tell(peers, self.epoch, key, value, until=self._limit())

    # --- as torch knows it ------------------------------------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        """Let every member have the value."""
        self._keys.append(self._of(key))
        self._tell(self._of(key), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""
        name = self._of(key)
        self._keys.append(name)
        return self._rendezvous.hear(
            self.epoch, {name: None}, until=self._limit(), among=self._peers.values()
        )[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys have values."""
        wanted = {self._of(key): None for key in keys}
        self._rendezvous.hear(self.epoch, wanted, until=self._limit(), among=self._peers.values())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return self._rendezvous.knows(self.epoch, [self._of(key) for key in keys])

    def delete_key(self, key: str) -> bool:
        """Delete nothing: what was told is forgotten with its epoch."""
        return False

    def add(self, key: str, value: int) -> int:
        """Refuse: a counter would need somebody who counts."""
        msg = f"the store of a group cannot count ({key})"
        raise ConfigError(msg)

    def has_extended_api(self) -> bool:
        """Return that only the plain methods are there."""
        return False

    def clone(self) -> GroupStore:
        """Return this store: any thread may use it."""
        return self

    def _of(self, key: str) -> str:
        return f"{self._name}/store/{key}"
