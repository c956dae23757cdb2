"""The protocol of every comparison: contestants take turns, and ratios are taken within a round.

A B C, A B C, A B C: other load on the machine affects all of them alike, so ratios hold where absolute figures drift.
"""

import json
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

FEWEST = 2  # whole rounds of which there are quartiles

R = TypeVar("R")
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Spread:
    """Figures of several rounds."""

    rounds: tuple[float, ...]

    @property
    def low(self) -> float:
        return min(self.rounds)

    @property
    def middle(self) -> float:
        return median(self.rounds)

    @property
    def high(self) -> float:
        return max(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        low, middle, high = quantiles(self.rounds)
        return low, middle, high

    def __truediv__(self, other: "Spread") -> "Spread":
        """Ratios, each within its own round."""
        return Spread(tuple(mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True)))


def alternate(contestants: Mapping[Name, Callable[[], R]], rounds: int) -> dict[Name, list[R]]:
    """Runs each contestant once in each of `rounds` rounds; returns the results of each, by round.

    An interrupt ends the rounds: the results are of those that were whole. Raises `KeyboardInterrupt` if those are
    fewer than `FEWEST`.
    """
    turns: list[dict[Name, R]] = []
    try:
        if PROGRESS.interrupted:  # in an earlier comparison of the same benchmark
            raise KeyboardInterrupt
        while len(turns) < rounds:
            when = f"round {len(turns) + 1} of {rounds}"
            turns.append({name: _turn(name, turn, when) for name, turn in contestants.items()})
    except KeyboardInterrupt:
        PROGRESS.interrupted = True
        if len(turns) < FEWEST:
            raise
    return {name: [results[name] for results in turns] for name in contestants}


def _turn(name: Hashable, turn: Callable[[], R], when: str) -> R:
    began = time.monotonic()
    result = turn()
    PROGRESS.tell(when, name, seconds=time.monotonic() - began, result=result)
    return result


@dataclass
class TurnLog:
    """Tells each turn as it ends, on stderr and as a line of `file`, so that an interrupt loses one turn at most.

    The file grows over all invocations: each line says which claim was measured, of which commit, and when.
    """

    file: Path | None = None
    commit: str = ""  # of the code that is measured
    claim: str = ""  # that is measured now
    interrupted: bool = False

    def tell(self, when: str, name: object, **figures: object) -> None:
        """`figures` that are numbers are shown; all are in the file."""
        shown = [f"{key} {value:.4g}" for key, value in figures.items() if isinstance(value, int | float)]
        print(f"{when}: {name}: {', '.join(shown)}", file=sys.stderr, flush=True)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as lines:
                turn = {"claim": self.claim, "commit": self.commit, "time": datetime.now(UTC).isoformat()}
                turn |= {"when": when, "name": str(name)}
                lines.write(json.dumps({**turn, **figures}, default=_plain) + "\n")


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


PROGRESS = TurnLog()
