"""What a script's run tells people is on stderr, in lines that are marked as stageline's."""

import sys


def say(*lines: str) -> None:
    """Writes the lines at once."""
    for line in lines:
        print(f"stageline: {line}", file=sys.stderr, flush=True)
