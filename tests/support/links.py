"""The links of one simulated process: by the other end, for which epoch they were opened.

It is the rule of the real one (`comm/succession.py`): who prepares a world uses again what its
present one has, and opens the rest; what was opened for a world that is not entered is closed.
"""

from __future__ import annotations

from collections.abc import Collection

from tmover.core.events import Plan

Opened = dict[str, int]
"""By endpoint of the other end, the epoch for which a link was opened."""


class Links:
    """See the module. Whose two ends do not agree on the epoch have no link."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._present: Opened = {}
        self._remains: Opened = {}
        """What only worlds before have used: kept until the present one is whole."""
        self._coming: Opened = {}
        self._epoch = 0
        """What is coming, or has come."""
        self._cut: set[tuple[str, int]] = set()

    def form(self, plan: Plan) -> None:
        self.prepare(plan, ())
        self.enter()

    def prepare(self, plan: Plan, afresh: Collection[str]) -> None:
        """Open what `plan` needs; the links to those in `afresh` once more."""
        endpoints = [member.endpoint for member in plan.members]
        if plan.epoch <= self._epoch or self._endpoint not in endpoints:
            return
        known = {**self._remains, **self._present}
        usable = {end: epoch for end, epoch in known.items() if end not in afresh}
        self._epoch = plan.epoch
        self._coming = {
            end: usable.get(end, plan.epoch) for end in endpoints if end != self._endpoint
        }

    def enter(self) -> None:
        self._remains = {**self._remains, **self._present}
        self._present = self._coming

    @property
    def has_remains(self) -> bool:
        """Whether links are open that the present world does not use."""
        return bool(self._remains)

    def release(self) -> None:
        self._remains = {}

    def cut(self, endpoint: str) -> None:
        """Note that the link to another end broke."""
        if endpoint in self._present:
            self._cut.add((endpoint, self._present[endpoint]))

    def to(self, endpoint: str, epoch: int) -> int:
        """Return which link to another end is used in the world of `epoch`, which is coming."""
        assert self._epoch == epoch, f"{self._endpoint} has prepared {self._epoch}, not {epoch}"
        return self._coming[endpoint]

    def is_cut(self, endpoint: str) -> bool:
        """Return whether a link broke that the coming world would use again."""
        return (endpoint, self._coming.get(endpoint, 0)) in self._cut
