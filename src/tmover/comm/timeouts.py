"""How long things may take in the communicator."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """In seconds. The last four say when a silent link counts as broken.

    A link on which nothing is sent is asked after `idle_s`, then every `interval_s`, and given up
    when `probes` questions were not answered: 4 s. On the link that is always read the kernel goes
    by `unacked_s` instead, asked or spoken to, and looks when a question is due: 4 s, too. That is
    a second less than a cut may take, and three answers have to be lost before it comes to that.
    """

    handshake_s: float = 10.0
    """Until a stranger has said who he is."""
    collective_s: float = 1800.0
    """From the start of an exchange to its end; a group's own timeout goes before it."""
    barrier_s: float = 120.0
    state_s: float = 60.0
    """One read or write of state that is handed over."""
    idle_s: int = 1
    """Ask whether the other end is there when nothing has come for so long."""
    interval_s: int = 1
    """Ask again after so long."""
    probes: int = 3
    """Give the link up after so many questions."""
    unacked_s: float = 3.5
    """Give the link up when what was sent stays unacknowledged for so long."""
