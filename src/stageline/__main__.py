"""Entry point of `python -m stageline`, which is the command `stageline`."""

from stageline.workers.cli import main

main()
