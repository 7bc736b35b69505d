"""What becomes of a collective: carried out, answered here, or refused."""

from __future__ import annotations

import enum


class Mode(str, enum.Enum):
    """What collectives do."""

    LIVE = "live"
    SANDBOX = "sandbox"
    """Answered here, without any peer."""
    REVOKED = "revoked"
    """The world is over; answered here inside an attempt, refused outside."""
