"""Keeps what a script has evaluated in the folder of its run: a fit that is resumed decides by it as it would have.

evaluations.jsonl    {"kind":"evaluation","step":200,"loss":0.41,"metrics":{"accuracy":0.8},"time":...,"fit":1}

One of a fit is on the disk before its next step is called. So where a run goes on after `position` steps, all that
a fit has evaluated until then is there; what came later is cut off, and evaluated again. A fit is known by its number
in the script.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import time

from stageline.workers.disk.atomic_file import keep_trying, sync
from stageline.workers.runs.metrics.lines import (
    EVALUATIONS,
    EvaluationMetrics,
    encoded,
    evaluation_line,
    keep_lines,
    lines_in,
)

Found = Mapping[str, float | None]


class EvaluationLog:
    """Of the run in `folder`, which goes on after `position` steps; without a folder, of this process alone. Raises
    `OSError`."""

    def __init__(self, folder: Path | None, position: int) -> None:
        self._path = None if folder is None else folder / EVALUATIONS
        self._lines: list[EvaluationMetrics] = []
        if self._path is not None and self._path.exists():
            keep_trying(partial(keep_lines, self._path, position, self._path), self._path)
            with self._path.open("rb") as file:
                self._lines = [line for line in lines_in(file) if isinstance(line, EvaluationMetrics)]

    def of_fit(self, number: int) -> list[tuple[int, Found]]:
        """(step, values) of each evaluation of that fit, in order."""
        return [(line.step, line.values) for line in self._lines if line.fit == number]

    def note(self, step: int, found: Found, fit: int | None = None) -> None:
        """An evaluation after `step` steps; one of a fit survives a power failure when this returns."""
        line = evaluation_line(step, found, time(), fit)
        if fit is not None:
            self._lines.append(line)
        if self._path is not None:
            size = self._path.stat().st_size if self._path.exists() else 0
            keep_trying(partial(_append, self._path, size, encoded(line), durable=fit is not None), self._path)


def _append(path: Path, size: int, text: bytes, *, durable: bool) -> None:
    """Adds `text` to the first `size` bytes of a file."""
    with path.open("ab") as file:
        file.truncate(size)
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if durable and not size:
        sync(path.parent)
