"""Who a process group is: torch has no place for that in a group without a registered backend."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tmover.bounds import LONGEST_S
from tmover.comm.fabric import Fabric
from tmover.comm.seam import Unbacked
from tmover.comm.untraced import untraced


@untraced
class NamedGroup(Unbacked):
    """A group of ranks; `ranks` are those of the world, in the group's order."""

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        ranks: Sequence[int],
        *,
        rank: int,
        store: Any,
        wire_name: str = "",
        order: int = 0,
    ) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # with a store it refuses subclasses
        self.ranks = tuple(ranks)
        self.timeout_s = fabric.timeouts.collective_s
        self.strict = False
        """Whether an interrupted collective raises even inside an attempt: it carries objects."""
        self._fabric = fabric
        self._group_rank = self.ranks.index(rank)
        self._store = store
        self._name = name
        self.wire_name = wire_name or name
        """Its own for ever: torch gives a name again once the group is destroyed."""
        self.order = order
        """Its number among the groups of this rank, as they were made."""
        self._desc = "undefined"

    # --- identity ---------------------------------------------------------------------------------

    def rebind(self, rank: int, ranks: Sequence[int], wire_name: str) -> None:
        """Hold another rank of the world, in the group that takes the place of this one there."""
        self.ranks, self.wire_name = tuple(ranks), wire_name
        self._group_rank = self.ranks.index(rank)

    @property
    def is_answered_for_another(self) -> bool:
        """Whether what comes may be what another rank has got, as in a rehearsal."""
        return self._fabric.rehearsal is not None

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._group_rank

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    getRank = rank
    getSize = size

    def name(self) -> str:
        """Return the backend's name."""
        return "tmover"

    getBackendName = name

    @property
    def group_name(self) -> Any:
        """The group's name, the same on all its ranks."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._desc

    def getGroupName(self) -> str:
        """Return the name, to C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return the description, to C++."""
        return self._desc

    def setGroupName(self, name: str) -> None:
        """Take the name, from C++."""
        self._name = name

    def setGroupDesc(self, desc: str) -> None:
        """Take the description, from C++."""
        self._desc = desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def get_group_store(self) -> Any:
        """Return this process's own store."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives take so long."""
        self.timeout_s = min(timeout.total_seconds(), LONGEST_S)

    _set_default_timeout = set_timeout
