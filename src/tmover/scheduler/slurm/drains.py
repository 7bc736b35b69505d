"""Which drains are those of `tmover drain`: their reason begins with a mark and an id. Pure."""

from __future__ import annotations

import re
import secrets

_OURS = re.compile(r"tmover:[0-9a-f]{6}(?: |$)")


def new_id() -> str:
    """Return an id for a drain, by which its reason and the journal can be told to belong."""
    return secrets.token_hex(3)


def reason_of(number: str, text: str) -> str:
    r"""Return the reason to give Slurm.

    >>> reason_of("0a1b2c", "fan 3\nis loud")
    'tmover:0a1b2c fan 3 is loud'
    """
    return f"tmover:{number} {' '.join(text.split())}".rstrip()


def is_ours(reason: str) -> bool:
    """Return whether `tmover drain` gave this reason. The site's hooks give others.

    >>> is_ours("tmover:0a1b2c fan 3 is loud"), is_ours("tmover: health check: fan 3")
    (True, False)
    """
    return _OURS.match(reason) is not None
