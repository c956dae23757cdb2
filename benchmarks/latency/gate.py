"""Holds a run at the beginning of a step, by its data source: so runs take turns between steps, without a signal.

allowed    a file: how many steps the run may begin; the benchmark writes it
waiting    a file beside it: the step that the run's first stage waits to begin, so all before have ended
"""

import os
from pathlib import Path
from time import sleep

POLL = 0.005  # seconds


class StepGate:
    """The two files in `folder`. A run and the process that measures it have one each."""

    def __init__(self, folder: Path) -> None:
        self._allowed = folder / "allowed"
        self._waiting = folder / "waiting"

    def allow(self, steps: int) -> None:
        """The run may begin so many steps, counted from its first."""
        _write(self._allowed, steps)

    def waits_for(self, step: int) -> bool:
        """Whether the run has come to the beginning of `step`."""
        return _read(self._waiting) >= step

    def pass_into(self, step: int) -> None:
        """Of the run: returns when it may begin `step`."""
        if _read(self._allowed) > step:
            return
        _write(self._waiting, step)
        while _read(self._allowed) <= step:
            sleep(POLL)


def _read(file: Path) -> int:
    return int(file.read_text()) if file.exists() else 0


def _write(file: Path, number: int) -> None:
    whole = file.with_suffix(f".{os.getpid()}")
    whole.write_text(str(number))
    whole.replace(file)
