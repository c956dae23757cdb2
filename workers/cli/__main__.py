"""`python -m workers.cli` is `stageline`."""

from . import main

main()
