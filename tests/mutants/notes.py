"""Notes of which test passes which place, and of how each test ended; put into the environment of a copy.

Code of the copy calls `at`; pytest has this module as a plugin.
"""

import os
from os import O_APPEND, O_CREAT, O_WRONLY, close, open, write  # tests replace those of `os`
from pathlib import Path
from typing import Any

PLACES, OUTCOMES = "places.txt", "outcomes.txt"
_FOLDER = Path(__file__).parent
_seen: set[tuple[int, str]] = set()


def at(place: int) -> None:
    """Note that the test that is running has passed `place`."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (place, test) not in _seen:
        _seen.add((place, test))
        _append(PLACES, f"{place}\t{test}\n")


def pytest_runtest_logreport(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _append(OUTCOMES, f"{report.outcome}\t{report.duration}\t{report.nodeid}\n")


def _append(name: str, line: str) -> None:
    try:
        file = open(str(_FOLDER / name), O_APPEND | O_CREAT | O_WRONLY, 0o644)
    except OSError:  # a test has taken descriptors or the disk away
        return
    write(file, line.encode())
    close(file)
