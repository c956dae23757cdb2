"""Reads the metrics of a run while it goes on: each line once, also when a worker that was replaced writes it again."""

import heapq
import os
from pathlib import Path

from .lines import EVALUATIONS, METRICS, MetricsLine, decoded, place_of


class MetricsTail:
    """Of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._files = [_FileTail(folder / name) for name in (METRICS, EVALUATIONS)]

    def read(self) -> list[MetricsLine]:
        """The lines since the last time, in the order of training as far as they are there."""
        return list(heapq.merge(*(file.read() for file in self._files), key=place_of))


class _FileTail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = 0
        self._newest = self._known = (-1, False)  # what was read last; up to where a file that was replaced is known

    def read(self) -> list[MetricsLine]:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._known = found.st_ino, 0, self._newest
                file.seek(self._offset)
                lines = [line for text in file if (line := self._next(text)) is not None]
        except FileNotFoundError:
            return []
        return lines

    def _next(self, text: bytes) -> MetricsLine | None:
        if not text.endswith(b"\n"):  # the rest is still to be written
            return None
        self._offset += len(text)
        line = decoded(text)
        if line is None or place_of(line) <= self._known:
            return None
        self._newest = place_of(line)
        return line
