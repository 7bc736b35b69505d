"""What a person sees while the demo runs: what has happened, and how far the job has come."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class Screen:
    """Lines of what happened, above one bar of steps. Without a terminal there is no bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("", visible=False)

    def say(self, text: str) -> None:
        """Add a line."""
        since = time.monotonic() - self._began
        self._progress.console.print(f"[dim]{since:6.1f} s[/]  {text}", highlight=False)

    def show(self, text: str, step: int, total: int) -> None:
        """Set the bar."""
        self._progress.update(
            self._bar, description=text, completed=step, total=total, visible=True
        )

    def hide(self) -> None:
        """Show no bar for now."""
        self._progress.update(self._bar, visible=False)

    def table(self, table: RenderableType) -> None:
        """Print what all came to, below everything else."""
        self._progress.stop()
        self._console.print(table)

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
