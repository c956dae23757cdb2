"""The protocol of every comparison: contestants take turns, and ratios are taken within a round.

A B C, A B C, A B C: other load on the machine affects all of them alike, so ratios hold where absolute figures drift.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

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
    """Runs each contestant once in each of `rounds` rounds; returns the results of each, by round."""
    turns = [{name: turn() for name, turn in contestants.items()} for _ in range(rounds)]
    return {name: [results[name] for results in turns] for name in contestants}
