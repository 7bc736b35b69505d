"""Which drains are tmover's own: their reason begins with its mark. Pure."""

from __future__ import annotations

import secrets

MARK = "tmover:"
"""An id follows that only this drain has; in the health check's reasons what it found does."""


def new_id() -> str:
    """Return an id for a drain, by which its reason and the journal can be told to belong."""
    return secrets.token_hex(3)


def reason_of(number: str, text: str) -> str:
    r"""Return the reason to give Slurm.

    >>> reason_of("0a1b2c", "fan 3\nis loud")
    'tmover:0a1b2c fan 3 is loud'
    """
    return f"{MARK}{number} {' '.join(text.split())}".rstrip()


def is_ours(reason: str) -> bool:
    """Return whether `tmover drain` gave this reason, or tmover's health check.

    >>> [is_ours(reason) for reason in ("tmover:0a1b2c fan", "tmover: health check: fan", "fan")]
    [True, True, False]
    """
    return reason.startswith(MARK)
