"""The `tmover` command: one file per subcommand. Imports no torch."""

from tmover.cli.main import main

__all__ = ["main"]
