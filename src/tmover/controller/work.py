"""What the controller's queue holds: what was said, what has happened, what was settled."""

from __future__ import annotations

from typing import NamedTuple, Union

from tmover import wire
from tmover.controller.journal import Entry, Settled
from tmover.core.events import AnyEvent


class Said(NamedTuple):
    """A message, the connection it came over, and who sent it."""

    route: bytes
    message: wire.ToController
    user: str = ""
    """Whose key it was sent with; "" is who runs the controller."""


Item = Union[Said, AnyEvent, Settled]


class Work(NamedTuple):
    """An item, and what it has the journal say."""

    item: Item
    entry: Entry | None = None
    refusal: str = ""
