"""How far a long measurement is, for whoever sits before a terminal."""

from __future__ import annotations

import sys

_ERASE = "\r\x1b[K"


def show(done: int, total: int, what: str) -> None:
    """Say how far it is, on one line that the next one replaces; nothing once it is done."""
    if sys.stderr.isatty():
        text = f"  {what} {max(0, done)} of {total}" if done < total else ""
        print(f"{_ERASE}{text}", end="", file=sys.stderr, flush=True)
