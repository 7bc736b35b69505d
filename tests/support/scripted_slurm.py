"""A Slurm that says of its nodes and reservations what a test says."""

from __future__ import annotations

import time

from tmover.errors import SlurmDenied
from tmover.scheduler.interface import NodeState
from tmover.scheduler.slurm.client import SlurmClient
from tmover.scheduler.slurm.commands import NodeDetail, Reservation

_STATES = {NodeState.DRAINING: "allocated+drain", NodeState.FAILING: "down"}


class ScriptedSlurm(SlurmClient):
    """Knows nodes and reservations only. Who has no rights may look."""

    def __init__(self, *nodes: str, has_rights: bool = True) -> None:
        super().__init__()
        self.has_rights = has_rights
        self.shown = {name: _node(name) for name in nodes}
        self.windows: list[Reservation] = []
        self.asked: list[str] = []
        """What was changed, in order."""

    def put(self, name: str, state: NodeState, reason: str = "") -> None:
        self.shown[name] = _node(name, state, reason)

    def reserve(self, *nodes: str, begins_in_s: float = 600.0, length_s: float = 3600.0) -> None:
        start = time.time() + begins_in_s
        self.windows.append(
            Reservation(
                name=f"maint{len(self.windows) + 1}", start=start, end=start + length_s,
                nodes=nodes, flags=frozenset({"MAINT", "IGNORE_JOBS"}), users=("root",),
                state="INACTIVE",
            )
        )  # fmt: skip

    def nodes(self) -> list[NodeDetail]:
        return list(self.shown.values())

    def reservations(self) -> list[Reservation]:
        return list(self.windows)

    def drain(self, node: str, reason: str) -> None:
        self._change(f"drain {node}")
        self.put(node, NodeState.DRAINING, reason)

    def resume(self, node: str) -> None:
        self._change(f"resume {node}")
        self.put(node, NodeState.ALLOCATED)

    def _change(self, what: str) -> None:
        if not self.has_rights:
            message = "slurm_update error: Invalid user id"
            raise SlurmDenied(message)
        self.asked.append(what)


def _node(name: str, state: NodeState = NodeState.ALLOCATED, reason: str = "") -> NodeDetail:
    slurm_state = _STATES.get(state, state.value)
    return NodeDetail(name=name, address=name, state=state, slurm_state=slurm_state, reason=reason)
