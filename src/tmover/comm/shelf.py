"""Things by tag, each tag's in order. A tag of which nothing is left costs nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Shelf(Generic[T]):
    """False when empty. A training may use a new tag in every step, for weeks.

    >>> shelf = Shelf()
    >>> shelf.put(7, "first"), shelf.put(7, "second"), shelf.put(8, "other")
    (None, None, None)
    >>> shelf.take(7), list(shelf), len(shelf)
    ('first', ['second', 'other'], 2)
    >>> shelf.only() is None, shelf.take(8), shelf.only()
    (True, 'other', 'second')
    >>> shelf.take(9) is None
    True
    """

    def __init__(self) -> None:
        self._by_tag: dict[int, deque[T]] = {}
        self._count = 0

    def put(self, tag: int, thing: T) -> None:
        """Put a thing behind the others of its tag."""
        self._by_tag.setdefault(tag, deque()).append(thing)
        self._count += 1

    def take(self, tag: int) -> T | None:
        """Take the first thing of a tag, if there is one."""
        things = self._by_tag.get(tag)
        if things is None:
            return None
        thing = things.popleft()
        self._count -= 1
        if not things:
            del self._by_tag[tag]
        return thing

    def only(self) -> T | None:
        """Return the only thing there is, and leave it; None if there are more, or none."""
        if self._count != 1:
            return None
        (things,) = self._by_tag.values()
        return things[0]

    def __iter__(self) -> Iterator[T]:
        for things in self._by_tag.values():
            yield from things

    def __len__(self) -> int:
        return self._count
