"""How warm a standby's process is: what is there, and how long its last shadow step took."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Warmth(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker, as it was when it said so."""

    step_s: float
    """Seconds that its last shadow step took."""
    modules: int = 0
    """Python modules that are imported."""
    state_bytes: int = 0
    """Bytes of parameters, buffers and optimizer state that it holds, the rank's own part."""
    graphs: int = 0
    """Graphs that torch has compiled."""
    loaders: int = 0
    """Processes that fetch batches."""
    links: int = 0
    """Connections to other workers, those of its own node: which others it needs, a slot tells."""
    proofs: int = 0
    """How often it has done another step since it rested."""


def coldest(of: Iterable[Warmth]) -> Warmth | None:
    """Return the least of what the workers of one standby have, and the longest step.

    >>> coldest([Warmth(step_s=1.0, graphs=2), Warmth(step_s=0.5, graphs=1)]).graphs
    1
    """
    each = list(of)
    if not each:
        return None
    return Warmth(
        step_s=max(one.step_s for one in each),
        modules=min(one.modules for one in each),
        state_bytes=min(one.state_bytes for one in each),
        graphs=min(one.graphs for one in each),
        loaders=min(one.loaders for one in each),
        links=min(one.links for one in each),
        proofs=min(one.proofs for one in each),
    )
