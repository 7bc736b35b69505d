"""Which drains are tmover's own: their reason begins with our mark. Pure."""

from __future__ import annotations

import secrets

MARK = "tmover:"
"""Begins the reason of every node that `tmover drain` drained; an id follows, then the text."""


def new_id() -> str:
    """Return an id for a drain, by which its reason and the journal can be told to belong."""
    return secrets.token_hex(3)


def reason_of(number: str, text: str) -> str:
    r"""Return the reason to give Slurm.

    >>> reason_of("0a1b2c", "fan 3\nis loud")
    'tmover:0a1b2c fan 3 is loud'
    """
    return f"{MARK}{number} {' '.join(text.split())}"


def is_ours(reason: str) -> bool:
    """Return whether `tmover drain` gave this reason.

    >>> is_ours("tmover:0a1b2c fan 3 is loud [root@2026-11-30T02:40:00]"), is_ours("Not responding")
    (True, False)
    """
    return reason.startswith(MARK)
