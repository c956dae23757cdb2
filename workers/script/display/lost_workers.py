"""Says which workers a run has lost, and which of them nothing replaces, from one status of the broker to the next."""

from collections.abc import Iterator
from typing import Any

from stageline.broker.membership.member import worker_label
from stageline.pipeline.printable import printable_line
from stageline.workers.runs.result import Facts

LONG = 5.0  # seconds that an empty place is waited for before it is told

LostProcess = tuple[int, int]  # the worker's index, and the pid of the process that was lost


class LostWorkers:
    """What is new in each status, as lines for people. `start`: how a replacement is started."""

    def __init__(self, start: str) -> None:
        self._start = start
        self._told: set[LostProcess] = set()
        self._awaited: set[LostProcess] = set()  # those of which the long wait was told

    def lines(self, facts: Facts) -> Iterator[str]:
        """Each loss is told once, and once more if its place is empty for long."""
        rows = {(row["index"], row["pid"]): row for row in facts["recovering"]}
        for loss, row in rows.items():
            if loss not in self._told:
                yield printable_line(f"{_label(row)} {row['how']}{_next(facts)}")
            if loss not in self._awaited and not row["given"] and row["since"] >= LONG:
                self._awaited.add(loss)
                yield printable_line(self._waiting(row))
        self._told = set(rows)  # a process of the same pid may take the place later
        self._awaited &= self._told

    def _waiting(self, row: dict[str, Any]) -> str:
        return (
            f"waiting for {_label(row)}, lost {row['since']:.0f} s ago. {self._start}. The run ends with its newest "
            f"checkpoint if none joins within {row['left']:.0f} s"
        )


def _label(row: dict[str, Any]) -> str:
    return worker_label(row["index"], row["stages"])


def _next(facts: Facts) -> str:
    return f"; its replacement begins at step {facts['checkpoint'] or 0}"
