"""How long things may take in the communicator."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """In seconds. The last four say when a silent link counts as broken."""

    handshake_s: float = 10.0
    """Until a stranger has said who he is."""
    collective_s: float = 1800.0
    """From the start of an exchange to its end; a group's own timeout goes before it."""
    barrier_s: float = 120.0
    state_s: float = 60.0
    """One read or write of state that is handed over."""
    idle_s: int = 2
    """Ask whether the other end is there when nothing has come for so long."""
    interval_s: int = 1
    """Ask again after so long."""
    probes: int = 3
    """Give the link up after so many questions."""
    unacked_s: float = 6.0
    """Give the link up when what was sent stays unacknowledged for so long."""
