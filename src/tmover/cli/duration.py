"""Durations as people type them: 90, 90s, 30m, 1h, 1h30m."""

from __future__ import annotations

import re

import click

_PARTS = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s?)?", re.ASCII)
_SECONDS = (86400, 3600, 60, 1)


def duration(text: str) -> float:
    """Return the seconds; the type of an option.

    >>> [duration(text) for text in ("90", "90s", "30m", "1h30m", "0")]
    [90.0, 90.0, 1800.0, 5400.0, 0.0]
    """
    match = _PARTS.fullmatch(text)
    if match is None or not text:
        msg = f"{text!r} is no duration; write for example 90s, 30m or 1h30m."
        raise click.BadParameter(msg)
    return float(sum(int(n or 0) * s for n, s in zip(match.groups(), _SECONDS, strict=True)))
