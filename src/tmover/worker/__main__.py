"""`python -m tmover.worker SCRIPT ARGS`."""

from tmover.worker.bootstrap import main

main()
