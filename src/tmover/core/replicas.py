"""Who keeps what a rank alone holds: a rank on another node with the same parameters, if any.

Such a rank needs nothing but the records to stand in for a lost one: it holds the rest itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

HELPERS = 3
"""How many send a part of a state beside the one that has the records, at most."""


def neighbours(nnodes: int, nproc: int) -> tuple[int, ...]:
    """Return each rank's keeper where nothing is known of replicas: the same rank one node on.

    >>> neighbours(3, 2)
    (2, 3, 4, 5, 0, 1)
    """
    size = nnodes * nproc
    return tuple((rank + nproc) % size for rank in range(size))


def peers(rank: int, keepers: Sequence[int]) -> tuple[int, ...]:
    """Return the other ranks that hold the same, its keeper first: each keeps for the one before.

    >>> peers(0, (2, 3, 4, 5, 0, 1))
    (2, 4)
    """
    found = []
    following = keepers[rank]
    while following != rank:
        found.append(following)
        following = keepers[following]
    return tuple(found)


def helpers(
    sources: Mapping[str, str],
    seated: Sequence[str],
    keepers: Sequence[int],
    *,
    fit: Collection[str],
) -> dict[str, tuple[str, ...]]:
    """Return a few workers that could send a part of what `sources` send, by receiving worker.

    `seated` are all, by rank; of them only the `fit` ones can help, and no receiver. Without
    keepers it is not known who holds the same.
    """
    found: dict[str, tuple[str, ...]] = {}
    for receiver, source in sources.items() if keepers else ():
        same = [seated[peer] for peer in peers(seated.index(receiver), keepers)]
        able = [w for w in same if w in fit and w != source and w not in sources]
        if able:
            found[receiver] = tuple(able[:HELPERS])
    return found


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
