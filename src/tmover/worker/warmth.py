"""What of a standby's process is warm: it looks at itself when it rests."""

from __future__ import annotations

import multiprocessing
import sys

from tmover.core.warmth import Warmth
from tmover.state.capture import Tracked, capture


def look(tracked: Tracked, *, step_s: float, proofs: int, links: int) -> Warmth:
    """Return how warm this process is."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = {} if dynamo is None else dynamo.counters.get("stats", {})
    return Warmth(
        step_s=round(step_s, 6),
        modules=len(sys.modules),
        state_bytes=sum(layout.size_bytes for layout in capture(tracked).layouts),
        graphs=int(counters.get("unique_graphs", 0)),
        loaders=len(multiprocessing.active_children()),
        links=links,
        proofs=proofs,
    )
