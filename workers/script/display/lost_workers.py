"""Says which workers a run has lost, and what has become of their places, from one status of the broker to the next."""

from collections.abc import Iterator
from typing import Any

from stageline.broker.ledger.registry import worker_label
from stageline.pipeline.printable import printable_line
from stageline.workers.runs.result import Facts

LONG = 5.0  # seconds that an empty place is waited for before it is told

LostProcess = tuple[int, int]  # the worker's index, and the pid of the process that was lost


class LostWorkers:
    """What is new in each status, as lines for people. `start`: how a replacement is started."""

    def __init__(self, start: str) -> None:
        self._start = start
        self._told: dict[LostProcess, dict[str, Any]] = {}
        self._awaited: set[LostProcess] = set()  # those of which the long wait was told
        self._finished = 0  # steps, as of the last status

    def lines(self, facts: Facts) -> Iterator[str]:
        """Each loss is told once, once more if its place is empty for long, and once more when it is made good."""
        rows = {(row["index"], row["pid"]): row for row in facts["recovering"]}
        for loss, row in rows.items():
            if loss not in self._told:
                yield printable_line(f"{_label(row)} {row['how']}{self._next(facts)}")
            if loss not in self._awaited and not row["given"] and row["since"] >= LONG:
                self._awaited.add(loss)
                yield printable_line(self._waiting(row))
        lost = {index for index, _ in rows}
        for loss, row in self._told.items():
            if loss not in rows and row["index"] not in lost:
                yield printable_line(_replaced(row, facts))
        self._told = rows  # a process of the same pid may take the place later
        self._awaited &= set(rows)
        self._finished = facts["finished_floor"]

    def _next(self, facts: Facts) -> str:
        """Where the replacement begins, and why the steps that are finished become fewer then."""
        step, finished = facts["checkpoint"] or 0, max(self._finished, facts["finished_floor"])
        again = f", so that {_counted(finished - step)} done again" if finished > step else ""
        return f"; its replacement begins at step {step}{again}"

    def _waiting(self, row: dict[str, Any]) -> str:
        return (
            f"waiting for {_label(row)}, lost {row['since']:.0f} s ago. {self._start}. The run ends with its newest "
            f"checkpoint if none joins within {row['left']:.0f} s"
        )


def _replaced(row: dict[str, Any], facts: Facts) -> str:
    process = next((f", in process {each['pid']}" for each in facts["workers"] if _has_place(each, row)), "")
    return f"{_label(row)} computes again{process}, {row['since']:.1f} s after it was lost"


def _has_place(worker: dict[str, Any], row: dict[str, Any]) -> bool:
    return worker["index"] == row["index"] and "pid" in worker


def _counted(steps: int) -> str:
    return "1 step is" if steps == 1 else f"{steps} steps are"


def _label(row: dict[str, Any]) -> str:
    return worker_label(row["index"], row["stages"])
