"""Which source sends which bytes of a state, where several ranks hold the same.

The bytes of all tensors, one after the other, are cut into chunks. The first source, which has the
receiver's records too, sends every chunk in which anything is its own; the others take a part of
the rest each, in one piece. All ends come to the same from the same tensors.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Sequence

from tmover.state.frames import CHUNK_BYTES
from tmover.state.memory import Layout

LEAST_BYTES = 32 << 20
"""What a source sends at least: for less, another connection costs more than it brings."""

Range = tuple[int, int]
"""Where a chunk begins and ends."""


def sources_for(size_bytes: int, available: int) -> int:
    """Return how many of the sources that there are take part.

    >>> sources_for(1 << 20, 4), sources_for(80 << 20, 4), sources_for(1 << 30, 4)
    (1, 2, 4)
    """
    return max(1, min(available, size_bytes // LEAST_BYTES))


def chunks(size_bytes: int) -> list[Range]:
    """Return all chunks of so many bytes."""
    starts = range(0, size_bytes, CHUNK_BYTES)
    return [(start, min(start + CHUNK_BYTES, size_bytes)) for start in starts]


def split(layouts: Sequence[Layout], alike: Collection[int], sources: int) -> list[list[Range]]:
    """Return each source's chunks; `alike` are the tensors, by number, that all of them hold."""
    ends = list(itertools.accumulate(layout.size_bytes for layout in layouts))
    every = chunks(ends[-1] if ends else 0)
    common = [chunk for chunk in every if _is_common(chunk, ends, alike)] if sources > 1 else []
    even = -(-len(every) // sources)
    first = max(0, even - (len(every) - len(common)))
    rest = len(common) - first
    bounds = [first + max(0, rest) * k // max(1, sources - 1) for k in range(sources)]
    taken = set(common[first:])
    others = [common[a:b] for a, b in itertools.pairwise(bounds)]
    return [[chunk for chunk in every if chunk not in taken], *others]


def _is_common(chunk: Range, ends: Sequence[int], alike: Collection[int]) -> bool:
    start, stop = chunk
    first, last = bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop)
    return all(number in alike for number in range(first, last + 1))
