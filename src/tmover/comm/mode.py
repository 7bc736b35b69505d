"""What becomes of a collective: carried out, answered here, or refused."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tmover.comm.work import Work


class Mode(str, enum.Enum):
    """What collectives do."""

    LIVE = "live"
    SANDBOX = "sandbox"
    """Answered here, without any peer."""
    REVOKED = "revoked"
    """The world is over; answered here inside an attempt, refused outside."""


Later = Callable[[], "Exception | None"]


class Rehearsal(Protocol):
    """What knows better answers in the sandbox than made-up ones. `group` is a `TmoverGroup`."""

    def expects(self, group: Any) -> bool:
        """Return whether the next call of a group is answered with what others have said."""

    def answer(self, group: Any, ask: Callable[[Any], None]) -> Later | None:
        """Answer a collective, or return what answers it once it is its turn in the group."""

    def message(self, group: Any, tensors: Any, peer: int, tag: int, *, outgoing: bool) -> Work:
        """Answer a message; return its work."""
