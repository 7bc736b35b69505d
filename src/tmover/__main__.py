"""`python -m tmover`: the command line."""

from tmover.cli.main import main

main()
