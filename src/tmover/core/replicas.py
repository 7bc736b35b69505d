"""Who keeps what a rank alone holds: a rank on another node with the same parameters, if any.

Such a rank needs nothing but the records to stand in for a lost one: it holds the rest itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def neighbours(nnodes: int, nproc: int) -> tuple[int, ...]:
    """Return each rank's keeper where nothing is known of replicas: the same rank one node on.

    >>> neighbours(3, 2)
    (2, 3, 4, 5, 0, 1)
    """
    size = nnodes * nproc
    return tuple((rank + nproc) % size for rank in range(size))


def keepers(digests: Sequence[bytes], nproc: int) -> tuple[int, ...] | None:
    """Return each rank's keeper, by what it holds; None if one has no replica on another node.

    Each rank keeps for exactly one. `digests` are by rank, `nproc` of them on a node.

    >>> keepers([b"a", b"a", b"a", b"a"], 2)
    (2, 3, 0, 1)
    >>> keepers([b"a", b"b", b"a", b"b"], 1), keepers([b"a", b"b", b"b", b"a"], 2)
    ((2, 3, 0, 1), (3, 2, 1, 0))
    >>> keepers([b"a", b"b", b"c", b"b"], 1) is None, keepers([b"a", b"a", b"b", b"b"], 2) is None
    (True, True)
    """
    found: dict[int, int] = {}
    for digest in dict.fromkeys(digests):
        ranks = [rank for rank, other in enumerate(digests) if other == digest]
        most = max(Counter(rank // nproc for rank in ranks).values())
        if 2 * most > len(ranks):
            return None  # more than half of them are on one node: some would keep for each other
        found.update(zip(ranks, ranks[most:] + ranks[:most], strict=True))
    return tuple(found[rank] for rank in range(len(digests)))
