"""Whole numbers as people type them, within bounds."""

from __future__ import annotations

from typing import Any

import click


class Number(click.IntRange):
    """The type of an option that is a count, a size or an id."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter as error:
            told = f"{value!r} is not {self._wanted()}."
            raise click.BadParameter(told, ctx, param) from error

    def _wanted(self) -> str:
        """Say which numbers will do.

        >>> Number(2)._wanted(), Number(1, 4096)._wanted()
        ('a whole number from 2 on', 'a whole number from 1 to 4096')
        """
        return f"a whole number from {self.min} {'on' if self.max is None else f'to {self.max}'}"
