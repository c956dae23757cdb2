"""What the layers of a model cost on the machine that has measured them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """`seconds` of each layer for the forward and backward of a microbatch; `leaving`: the bytes of the activation that
    it hands on. `taken(begin, end, in_flight)`: the bytes of a stage that has the layers from `begin` up to `end`, and
    so many microbatches in flight; more layers never take less."""

    names: Sequence[str]
    seconds: Sequence[float]
    leaving: Sequence[int]
    taken: Callable[[int, int, int], int]

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.seconds)

    @property
    def until(self) -> list[float]:
        """The seconds of all layers before each one, and at the end of all."""
        return [0.0, *accumulate(self.seconds)]
