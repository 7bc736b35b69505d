"""What people type, and what is shown to them: text that a wire and a terminal can carry."""

from __future__ import annotations

from typing import Any

import click


class Text(click.types.StringParamType):
    """Text in UTF-8: nothing else can be sent or kept."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        text = str(super().convert(value, param, ctx))
        if not is_utf8(text):
            self.fail(f"'{plain(text)}' is not UTF-8.", param, ctx)
        return text


def is_utf8(text: str) -> bool:
    r"""Return whether the text came from bytes that are UTF-8.

    >>> is_utf8("é"), is_utf8("\udcff")
    (True, False)
    """
    return not any("\ud800" <= character <= "\udfff" for character in text)


def plain(text: str) -> str:
    r"""Return the text with what would move a terminal's cursor, or cannot be shown, written out.

    >>> plain("node\x1b[2J"), plain("nœud 1")
    ('node\\x1b[2J', 'nœud 1')
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
