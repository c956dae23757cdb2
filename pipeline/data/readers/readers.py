"""Processes that draw batches ahead of their use, in the order of the steps.

              step to draw                  batch
    Readers ──── 7, 9, ... ───> reader 0 ──────────> 7, 9, ...
            ──── 8, 10, ... ──> reader 1 ──────────> 8, 10, ...

They are forked with the first batch and serve all epochs. Another step than the next one costs what was drawn ahead. If
a reader dies, others draw again what it had, with the same bits.
"""

import os
import warnings
import weakref
from collections.abc import Callable

from stageline.pipeline.data.batch import Batch
from stageline.pipeline.errors import DataError

from .reader_process import Reader, ReaderDied, start_reader

AHEAD = 2  # steps that each reader has been asked for


class Readers:
    """`count` processes that call `draw`, which gives the batch of a step or raises `DataError`."""

    def __init__(self, draw: Callable[[int], Batch], count: int) -> None:
        self._draw = draw
        self._count = count
        self._next = 0  # the step whose batch comes next
        self._readers: list[Reader] = []
        _all.add(self)

    def batch(self, step: int) -> Batch:
        """The batch of `step`. Raises `DataError` as `draw` does, or if readers die one after the other."""
        try:
            return self._read(step)
        except ReaderDied as died:
            warnings.warn(f"{died}. What it had is drawn again.", RuntimeWarning, stacklevel=3)
        try:
            return self._read(step)
        except ReaderDied as died:
            raise DataError(f"{died}; so did the one before it. {died.way_out}.") from None

    def close(self) -> None:
        """Ends the processes; the next batch starts others."""
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.kill()

    def __del__(self) -> None:
        self.close()

    def leave_to_parent(self) -> None:
        """In a forked process: the readers are its parent's, and this process has none."""
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.connection.close()

    def _read(self, step: int) -> Batch:
        try:
            if not self._readers or step != self._next:
                self._begin_at(step)
            self._next = step + 1
            reader = self._readers[step % self._count]
            reader.ask_for(step + AHEAD * self._count)
            return reader.batch()
        except DataError:
            raise
        except BaseException:  # Ctrl-C too: half a batch may be left in the connection
            self.close()
            raise

    def _begin_at(self, step: int) -> None:
        while len(self._readers) < self._count:
            self._readers.append(start_reader(self._draw))
        for reader in self._readers:
            reader.forget()
        for ahead in range(step, step + AHEAD * self._count):
            self._readers[ahead % self._count].ask_for(ahead)


_all: "weakref.WeakSet[Readers]" = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for readers in list(_all):
        readers.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
