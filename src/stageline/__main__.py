"""`python -m stageline` is the command `stageline`."""

from stageline.workers.cli import main

main()
