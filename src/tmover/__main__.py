"""`python -m tmover`, and `tmover`: the command line."""

import sys


def main() -> None:
    """Run the command line; a Ctrl-C while it is still being imported is one line, too."""
    try:
        from tmover.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
